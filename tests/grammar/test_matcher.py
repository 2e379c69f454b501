"""A matcher's state is a function of the tokens it is told, however they come."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.grammar.book import Compiled
from batonlm.grammar.compiler import compile_grammar, load_vocabulary
from tests.grammar.answering import BUNDLED

TOKENS = load_vocabulary(BUNDLED, special=(), eos_token_ids=(2,))
(END,) = TOKENS.eos_tokens
PROMPT = [5, 6, 7]
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"string","maxLength":9},'
    '"b":{"type":"array","items":{"type":"integer"},"maxItems":4}},"required":["a","b"]}'
)


def compiled(kind: GrammarKind, text: str) -> Compiled:
    return Compiled(compile_grammar(TOKENS, Grammar(kind, text)))


def ids(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]


@pytest.mark.parametrize("seed", range(4))
def test_replayed_it_allows_the_same(seed: int) -> None:
    grammar = compiled(GrammarKind.JSON_SCHEMA, SCHEMA)
    draw = random.Random(seed)
    tokens = list(PROMPT)
    masks: list[bytes] = []
    step_by_step = grammar.matcher()
    while len(masks) < 200:
        masks.append(step_by_step.allowed(tokens, len(PROMPT)))
        token = draw.choice(ids(masks[-1]))
        if token == END:
            break
        tokens.append(token)
    for size, mask in enumerate(masks):
        assert grammar.matcher().allowed(tokens[: len(PROMPT) + size], len(PROMPT)) == mask
    jumping = grammar.matcher()
    for size in range(0, len(masks), 7):
        assert jumping.allowed(tokens[: len(PROMPT) + size], len(PROMPT)) == masks[size]


@pytest.mark.parametrize("seed", range(4))
def test_behind_drafts_it_allows_the_same_and_takes_none_of_them(seed: int) -> None:
    grammar = compiled(GrammarKind.JSON_SCHEMA, SCHEMA)
    draw = random.Random(seed)
    tokens = list(PROMPT)
    matcher = grammar.matcher()
    for _ in range(60):
        drafts: list[int] = []
        expected = [grammar.matcher().allowed(tokens, len(PROMPT))]
        while len(drafts) < 5:
            free = [token for token in ids(expected[-1]) if token != END]
            if not free:
                break
            drafts.append(draw.choice(free))
            expected.append(grammar.matcher().allowed([*tokens, *drafts], len(PROMPT)))
        assert matcher.allowed_behind(tokens, len(PROMPT), drafts) == expected
        # The first that is not allowed, and all behind it, are left out.
        wrong = next(i for i in range(2048) if i not in ids(expected[-1]))
        longer = [*drafts, wrong, wrong]
        assert matcher.allowed_behind(tokens, len(PROMPT), longer) == expected
        assert matcher.allowed(tokens, len(PROMPT)) == expected[0]
        free = [token for token in ids(expected[0]) if token != END]
        if not free:
            break
        tokens.append(draw.choice(free))


def test_asked_twice_it_says_the_same() -> None:
    matcher = compiled(GrammarKind.REGEX, "[ab]{3}").matcher()
    assert matcher.allowed(PROMPT, 3) == matcher.allowed(PROMPT, 3)


def test_the_end_is_allowed_when_it_may_come_and_alone_when_nothing_else_can() -> None:
    matcher = compiled(GrammarKind.REGEX, "[0-9]{1,2}").matcher()
    (one,), (two,) = TOKENS.tokenize_str("1"), TOKENS.tokenize_str("2")
    assert END not in ids(matcher.allowed([], 0))
    between = ids(matcher.allowed([one], 0))
    assert END in between and len(between) > 1
    assert ids(matcher.allowed([one, two], 0)) == [END]


def test_what_does_not_follow_is_stuck_and_says_so() -> None:
    matcher = compiled(GrammarKind.REGEX, "[0-9]+").matcher()
    assert matcher.stuck == ""
    assert not any(matcher.allowed(TOKENS.tokenize_str("x"), 0))
    assert matcher.stuck.startswith("cannot be followed")
    assert matcher.stuck.isprintable()


def test_choices_do_not_disturb_one_another() -> None:
    grammar = compiled(GrammarKind.JSON_SCHEMA, SCHEMA)
    texts: Iterable[str] = ('{"a": "x', '{"a": "yy", "b": [1', "")
    expected = [grammar.matcher().allowed(TOKENS.tokenize_str(text), 0) for text in texts]
    matchers = [grammar.matcher() for _ in texts]
    parts = [TOKENS.tokenize_str(text) for text in texts]
    for size in range(max(map(len, parts)) + 1):
        for matcher, part in zip(matchers, parts, strict=True):
            matcher.allowed(part[:size], 0)
    ended = [m.allowed(part, 0) for m, part in zip(matchers, parts, strict=True)]
    assert ended == expected
