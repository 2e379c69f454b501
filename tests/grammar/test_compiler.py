"""Grammars of every kind are compiled, or refused in words that say what is wrong."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.grammar.compiler import compile_grammar, load_vocabulary
from batonlm.router.api import translation
from tests.grammar.answering import BUNDLED

TOKENS = load_vocabulary(BUNDLED, special=(), eos_token_ids=(2,))


def compiled(kind: GrammarKind, text: str) -> LLMatcher:
    return compile_grammar(TOKENS, Grammar(kind, text))


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether the whole text, and no less, follows it."""
    fresh = matcher.deep_copy()
    ids = TOKENS.tokenize_str(text)
    return fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.REGEX, "a+b?", "aab", "aabb"),
        (GrammarKind.REGEX, "a|b\nc", "b\nc", "ab"),
        (GrammarKind.LARK, 'start: "a" num\nnum: /[0-9]+/', "a12", "12"),
        (GrammarKind.GBNF, 'root ::= "a" num\nnum ::= [0-9]+', "a12", "12"),
        (GrammarKind.JSON_SCHEMA, '{"type":"integer"}', "-12", "1.5"),
        (GrammarKind.JSON_SCHEMA, "{}", '{"a": [1, null]}', "{"),
        (GrammarKind.JSON_SCHEMA, '{"enum":["a",3]}', "3", "4"),
    ],
)
def test_the_whole_answer_follows(kind: GrammarKind, text: str, good: str, bad: str) -> None:
    matcher = compiled(kind, text)
    assert takes(matcher, good)
    assert not takes(matcher, bad)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "JSON"),
        (GrammarKind.JSON_SCHEMA, "true", "JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type":"thing"}', "thing"),
        (GrammarKind.JSON_SCHEMA, '{"not":{"type":"null"}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"(?=a)b"}', ""),
        (GrammarKind.JSON_SCHEMA, '{"$ref":"#/nowhere"}', ""),
        (GrammarKind.REGEX, "(a", ""),
        (GrammarKind.LARK, "start: nothing", "nothing"),
        (GrammarKind.GBNF, "root ::= (", "GBNF"),
        (GrammarKind.GBNF, 'start ::= "a', ""),
    ],
)
def test_what_cannot_be_followed_is_refused(kind: GrammarKind, text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compiled(kind, text)
    assert refused.value.field == "grammar"
    assert says in refused.value.message
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (translation.choice(["so <|user|>", "<tool_call>\n<|end|>"], "choice"), "so <|user|>"),
        (Grammar(GrammarKind.REGEX, r"<\|end\|>\x3cb"), "<|end|><b"),
        (Grammar(GrammarKind.LARK, 'start: "a<|end|>"'), "a<|end|>"),
        (Grammar(GrammarKind.GBNF, 'root ::= "a<|end|>"'), "a<|end|>"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "\\u003c|end|>"}'), '"<|end|>"'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["<|begin|>"]}'), '"<|begin|>"'),
    ],
)
def test_the_spelling_of_a_special_token_is_text(grammar: Grammar, text: str) -> None:
    """All that is allowed can be taken, and leads to the text in tokens that are not special."""
    matcher, taken = compile_grammar(TOKENS, grammar), b""
    while taken != text.encode():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(TOKENS.vocab_size) if mask[token // 8] >> token % 8 & 1]
        assert allowed and not any(map(TOKENS.is_special_token, allowed))
        pieces = {token: TOKENS.decode_bytes([token]) for token in allowed}
        token = next(t for t, piece in pieces.items() if text.encode().startswith(taken + piece))
        assert matcher.consume_tokens([token])
        taken += pieces[token]
    assert matcher.is_accepting()


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6))
@example(["a|b", "(", "\\", "\n", '"', "/", "]-[", "a{2}", "\x00", "😀é"])
def test_a_choice_takes_its_texts_and_no_other(texts: list[str]) -> None:
    matcher = compile_grammar(TOKENS, translation.choice(texts, "choice"))
    for text in texts:
        assert takes(matcher, text)
        for other in (text[:-1], text + "x", text.swapcase()):
            assert takes(matcher, other) == (other in texts)


def test_blanks_between_json_tokens_have_an_end() -> None:
    matcher = compiled(GrammarKind.JSON_SCHEMA, '{"type":"array"}')
    assert takes(matcher, "[1, 2]")
    assert takes(matcher, "[\n    1,\n    2\n]")
    assert not takes(matcher, "[  1]")
    assert not takes(matcher, "[\n\n1]")


def test_keys_come_in_the_order_of_the_schema() -> None:
    properties = {"b": {"type": "null"}, "a": {"type": "null"}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["a", "b"]})
    matcher = compiled(GrammarKind.JSON_SCHEMA, schema)
    assert takes(matcher, '{"b": null, "a": null}')
    assert not takes(matcher, '{"a": null, "b": null}')


def test_lark_and_gbnf_are_told_apart() -> None:
    assert translation.lark_or_gbnf('root ::= "a"').kind is GrammarKind.GBNF
    assert translation.lark_or_gbnf('start: "a"').kind is GrammarKind.LARK


def test_special_tokens_are_no_text() -> None:
    """The same token, once by tokenizer.json's word and once by tokenizer_config.json's."""
    (end,) = TOKENS.eos_tokens
    text = TOKENS.decode_str([end])
    assert re.fullmatch(r"<.*>", text)
    matcher = compiled(GrammarKind.REGEX, ".+")
    assert matcher.validate_tokens([end]) == 0
