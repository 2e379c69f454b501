"""Stop strings are found at the first character that completes one, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.detokenizer.text import MAX_STOP_STRINGS, StopMatcher

LETTERS = st.text(alphabet="abé😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: where the shortest beginning of the text that ends with a stop string ends."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(text=LETTERS, stops=STOPS, places=st.lists(st.integers(0, 100), max_size=8))
def test_finds_the_first_completed_one(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    found, before = None, 0
    for piece in cut(text, places):
        match = matcher.feed(piece)
        if match:
            found = (before + match.end, match.stop_string)
            break
        before += len(piece)
    assert found == first_match(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_holds_back_exactly_what_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for index, character in enumerate(text):
        if matcher.feed(character):
            return
        ends = (text[start : index + 1] for start in range(index + 1))
        held = (len(end) for end in ends if any(stop.startswith(end) for stop in stops))
        assert matcher.held == max(held, default=0)


def test_unarmed_matches_pass() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.feed("xab", armed=False) is None
    assert matcher.held == 0
    match = matcher.feed("yab")
    assert match and (match.stop_string, match.end) == ("ab", 3)


@pytest.mark.parametrize("stops", [("a",) * (MAX_STOP_STRINGS + 1), ("a", ""), ("ab" * 5000,)])
def test_refuses_what_it_cannot_bound(stops: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        StopMatcher(stops)
    assert raised.value.field == "stop_strings"
