"""The bundled model's tokens, with and without the markers of answers as tokens of their own."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from batonlm.core.request.formats.families import MARKERS

_FILE = str(files("batonlm") / "models" / "baton-tiny" / "tokenizer.json")


@cache
def tokens(with_markers: bool) -> tuple[Tokenizer, LLTokenizer]:
    saved = json.loads(Path(_FILE).read_text("utf-8"))
    saved["added_tokens"] = [t for t in saved["added_tokens"] if t["content"] not in MARKERS]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    if with_markers:
        tokenizer.add_tokens(
            [AddedToken(m, special=m.startswith("["), normalized=False) for m in MARKERS]
        )
    return tokenizer, LLTokenizer(tokenizer.to_str())


def marker_ids(with_markers: bool) -> dict[str, int]:
    tokenizer, _ = tokens(with_markers)
    ids = ((marker, tokenizer.token_to_id(marker)) for marker in MARKERS if with_markers)
    return {marker: token_id for marker, token_id in ids if token_id is not None}


def follows(grammar: str, text: str, *, with_markers: bool) -> bool:
    """Whether a text is a whole answer by a grammar, as llguidance sees it."""
    tokenizer, matching = tokens(with_markers)
    matcher = LLMatcher(matching, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
