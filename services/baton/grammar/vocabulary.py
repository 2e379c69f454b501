"""Reads a model folder's tokenizer for matching; encodes nothing and knows no grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from llguidance import LLTokenizer

from baton.core.errors import InvalidArgument


def load(
    folder: Path,
    *,
    special: Collection[str],
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> LLTokenizer:
    """The tokens of tokenizer.json as bytes. Takes a second for a hundred thousand of them.

    special: texts of tokens that are no text, whether tokenizer.json says so or not. vocab_size: of
    the model, None: the tokenizer's own. eos_token_ids: the model's, None: as the tokenizer's files
    tell. Raises InvalidArgument naming `model` for a folder that cannot be used.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_bytes())
        added = tokenizer.get("added_tokens", ())
        for token in added:
            token["special"] = bool(token.get("special")) or token["content"] in special
        eos = None if eos_token_ids is None else list(eos_token_ids)
        return LLTokenizer(json.dumps(tokenizer), n_vocab=vocab_size, eos_token=eos)
    except Exception as error:  # neither library raises anything more exact
        raise InvalidArgument(f"{path} cannot be used to follow grammars", field="model") from error
