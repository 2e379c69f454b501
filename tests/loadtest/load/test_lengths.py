"""Lengths by name."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.load.scenario import NAMED, SHARES, Quantiles, fixed, named
from batonlm.core.errors import InvalidArgument


@pytest.mark.parametrize("name", NAMED)
def test_a_table_has_every_share_and_never_falls(name: str) -> None:
    for table in (NAMED[name].prompt, NAMED[name].output):
        assert len(table.tokens) == len(SHARES)
        assert list(table.tokens) == sorted(table.tokens)
        for share, tokens in zip(SHARES, table.tokens, strict=True):
            assert table.at(share) == pytest.approx(tokens)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 10_000), min_size=len(SHARES), max_size=len(SHARES)).map(sorted),
    st.lists(st.floats(0, 1), min_size=2).map(sorted),
)
def test_longer_for_a_larger_share(tokens: list[int], shares: list[float]) -> None:
    table = Quantiles(tuple(tokens))
    found = [table.at(share) for share in shares]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(found))
    assert tokens[0] <= found[0] and found[-1] <= tokens[-1] + 1e-6


@pytest.mark.parametrize("name", NAMED)
def test_what_is_drawn_has_the_tables_quantiles(name: str) -> None:
    draw = random.Random(1)
    drawn = sorted(NAMED[name].prompt.draw(draw, 1.0) for _ in range(20_000))
    for share in (0.2, 0.5, 0.9):
        low, high = NAMED[name].prompt.at(share - 0.02), NAMED[name].prompt.at(share + 0.02)
        assert low - 1 <= drawn[int(share * len(drawn))] <= high + 1


def test_there_is_always_a_token() -> None:
    assert NAMED["chat"].prompt.draw(random.Random(0), 1e-6) == 1
    assert fixed(7, 3).prompt.draw(random.Random(0), 2.0) == 14


def test_an_unknown_name() -> None:
    with pytest.raises(InvalidArgument, match="'talk' is none of chat, code, rag, agent"):
        named("talk")
