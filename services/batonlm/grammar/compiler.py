"""Compiles a Grammar to llguidance's matcher for one vocabulary.

Matching has limits that end in an error. The compilation itself cannot be interrupted, so the
tokenizer first tries it in a process that can be killed (`Checker`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.formats.lark import JSON_SPACING
from batonlm.core.request.request import Grammar, GrammarKind


def load_vocabulary(
    folder: Path,
    *,
    special: Collection[str],
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> LLTokenizer:
    """The vocabulary of tokenizer.json for matching. Takes a second for a hundred thousand tokens.

    special: texts of tokens to treat as special, whatever tokenizer.json says. vocab_size: the
    model's; None: the tokenizer's own. eos_token_ids: the model's; None: those of the tokenizer's
    files. Raises InvalidArgument naming `model` for a folder that cannot be used.
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


FIELD = "grammar"
_MAX_REPORT = 200

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits for one choice. The limits per step bound the time of one mask, which the whole batch
waits for, to milliseconds."""

_JSON = {
    **JSON_SPACING,
    # Unsupported keywords of a schema are an error instead of being ignored.
    "lenient": False,
}


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the start of the grammar. Raises InvalidArgument naming `grammar`, with
    llguidance's report on the client's text.
    """
    text = _text(grammar)
    if _spells_special(tokenizer, grammar.text):
        text = _without_forcing(text)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidArgument(f"cannot be followed: {report(matcher)}", field=FIELD)
    if not any(matcher.compute_bitmask()):
        why = report(matcher) or "this model has no token that it could begin with"
        raise InvalidArgument(f"cannot be followed: {why}", field=FIELD)
    return matcher


_ESCAPED = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}|\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})")


def _spells_special(tokenizer: LLTokenizer, text: str) -> bool:
    """Whether a grammar has the spelling of a special token in it, also with escapes."""
    text = _ESCAPED.sub(lambda found: _character(int(found[found.lastindex or 0], 16)), text)
    ids = tokenizer.tokenize_str(text.replace("\\", ""))
    return any(map(tokenizer.is_special_token, ids))


def _character(code: int) -> str:
    return chr(code) if code < 0xD800 else "\ufffd"


_CONVERTED = "%llguidance {}\n"
"""The first line of what llguidance converts from GBNF."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


def _without_forcing(text: str) -> str:
    """The grammar, which then allows all tokens that fit where the text is determined, not only the
    tokenizer's own. llguidance otherwise allows nothing but the special token there, whose text
    may be spelled only in other tokens, and refuses it then."""
    if not text.startswith("{"):
        text = text.removeprefix(_CONVERTED)
        # A grammar has one such line, which may be the client's own.
        return text if "%llguidance" in text else _NO_FORCING + text
    whole = json.loads(text)
    (only,) = whole["grammars"]
    lark = only["lark_grammar"] or f"start: %json {json.dumps(only['json_schema'])}"
    return json.dumps({**whole, "grammars": [{"lark_grammar": _NO_FORCING + lark}]})


def report(matcher: LLMatcher) -> str:
    """The matcher's error in one line of printable characters, or ""."""
    text = matcher.get_error().split("<non-verbose/>")[0]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_REPORT else line[: _MAX_REPORT - 1] + "…"


def _text(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises InvalidArgument."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)  # type: ignore[arg-type]
            except ValueError:
                raise InvalidArgument("must be a JSON schema", field=FIELD) from None
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.GBNF:
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
            except Exception:  # the converter raises no specific exceptions
                raise InvalidArgument("must be a grammar in GBNF", field=FIELD) from None
