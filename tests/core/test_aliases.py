"""Which model a conversation gets whose name stands for several, and the file that says so."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import ChatPrompt, Message, Request, TextPrompt, TokenPrompt
from batonlm.core.routing.aliases import Alias, Weights, conversation, parse, render

KEYS = [f"conversation {number}".encode() for number in range(20_000)]
ALL = ("a", "b", "c")

NAMES = st.sampled_from(ALL)
WEIGHTS = st.dictionaries(NAMES, st.integers(0, 1000), min_size=1).filter(
    lambda found: any(found.values())
)


def shares(alias: Alias, served: tuple[str, ...] = ALL) -> dict[str, float]:
    counted = Counter(alias.model(key, served) for key in KEYS)
    return {model: count / len(KEYS) for model, count in counted.items()}


def test_conversations_are_shared_out_by_weight() -> None:
    assert shares(Alias((("a", 90), ("b", 10)))) == pytest.approx({"a": 0.9, "b": 0.1}, abs=0.01)
    thirds = shares(Alias((("a", 1), ("b", 0), ("c", 2))))
    assert thirds == pytest.approx({"a": 1 / 3, "c": 2 / 3}, abs=0.01)


def test_only_as_many_conversations_move_as_have_to() -> None:
    before = Alias((("a", 90), ("b", 10)))
    after = before.changed((("b", 30), ("a", 70)))
    assert after.former == before.weights
    moved = [key for key in KEYS if before.model(key, ALL) != after.model(key, ALL)]
    assert all(after.model(key, ALL) == "b" for key in moved)
    assert len(moved) / len(KEYS) == pytest.approx(0.2, abs=0.01)


@given(WEIGHTS, st.sets(NAMES), st.binary(max_size=40))
def test_a_model_that_is_served_comes_first_and_none_without_weight(
    weights: dict[str, int], served: set[str], key: bytes
) -> None:
    alias = Alias(tuple(weights.items()))
    chosen = alias.model(key, served)
    assert weights[chosen] > 0
    able = {model for model in served if weights.get(model)}
    assert not able or chosen in able
    assert chosen == alias.model(key, served)


def test_a_conversation_is_known_by_its_start_and_who_asks() -> None:
    def chat(*texts: str) -> Request:
        roles = ["system", "user", "assistant", "user"]
        messages = (Message(role, text) for role, text in zip(roles, texts, strict=False))
        return Request(ChatPrompt(tuple(messages)))

    first = conversation(chat("s", "hello"))
    assert conversation(chat("s", "hello", "hi", "what next?")) == first
    assert len({first, conversation(chat("t", "hello")), conversation(chat("s", "bye"))}) == 3
    for longer, shorter in (
        (TextPrompt("x" * 5000), TextPrompt("x" * 3000)),
        (TokenPrompt(tuple(range(4000))), TokenPrompt(tuple(range(3000)))),
    ):
        assert conversation(Request(longer)) == conversation(Request(shorter))
    assert len(conversation(chat("s" * 10**6, "\ud800" * 10**6))) < 10_000


@given(st.dictionaries(st.sampled_from(("chat", "x/y", "z:1")), WEIGHTS))
def test_what_is_written_is_read(entries: dict[str, dict[str, int]]) -> None:
    aliases = {name: Alias(tuple(found.items())) for name, found in entries.items()}
    changed = {name: alias.changed((("c", 1),)) for name, alias in aliases.items()}
    assert parse(render(aliases)) == aliases
    assert parse(render(changed)) == changed


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "aliases"),
        ("[]", "the document"),
        ('{"alias": {}}', "the document"),
        ('{"aliases": []}', "aliases"),
        ('{"aliases": {"": {}}}', "aliases"),
        ('{"aliases": {"a\\n": {}}}', "aliases"),
        ('{"aliases": {"a": {}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"models": {"m": 0}}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"models": {"m": -1}}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"models": {"m": true}}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"models": {"m": 0.5}}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"models": {"m": 1e400}}}}', "aliases.a.models"),
        ('{"aliases": {"a": {"model": {"m": 1}}}}', "aliases.a"),
        ('{"aliases": {"a": {"models": {"m": 1}, "former": {"m": "x"}}}}', "aliases.a.former"),
        ("[" * 100_000, "aliases"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
    assert caught.value.field == field


def test_weights_keep_their_order() -> None:
    weights: Weights = (("b", 1), ("a", 1))
    assert Alias(weights).changed((("a", 5), ("c", 1), ("b", 2))).weights == (
        ("b", 2),
        ("a", 5),
        ("c", 1),
    )
