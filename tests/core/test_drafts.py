"""Drafts by look-up: what stood behind the same tokens before, and what that was worth."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.scheduler.drafts import (
    MOST_DRAFTS,
    MOST_TAKEN_UP,
    SHORTEST,
    Draft,
    NgramDrafter,
    NgramIndex,
    Prices,
    Wish,
)


def repetition(tokens: Sequence[int], place: int) -> int:
    """How many tokens before a place stand at the end, too."""
    length = 0
    while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def drafted(drafter: NgramDrafter, tokens: Sequence[int], most: int = 8, number: int = 0) -> Draft:
    (draft,) = drafter.draft([Wish(number, tokens, most)], Prices())
    return draft


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(TEXTS, st.data())
def test_a_place_is_found_wherever_one_is(tokens: list[int], data: st.DataObject) -> None:
    """However the tokens come."""
    index = NgramIndex(len(tokens))
    done = 0
    while done < len(tokens):
        done = data.draw(st.integers(done + 1, len(tokens)))
        index.extend(tokens, done)
        place = index.find(tokens[:done])
        there = [p for p in range(1, done) if repetition(tokens[:done], p) >= SHORTEST]
        assert bool(place) == bool(there)
        assert not place or place in there
        assert not place or index.length <= repetition(tokens[:done], place)
    assert index.size == len(tokens)


def test_the_longest_repetition_is_taken_and_of_equals_the_newest() -> None:
    longer, newer = [9, 8, 1, 2, 3, 70], [1, 2, 3, 60]
    tokens = [*longer, *newer, 9, 8, 1, 2, 3]
    assert drafted(NgramDrafter(), tokens, 1).tokens == [70]
    assert drafted(NgramDrafter(), [*newer, 1, 2, 3, 61, 5, 1, 2, 3], 1).tokens == [61]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(2, 6))
def test_what_goes_round_is_foretold_to_the_end(cycle: list[int], turns: int) -> None:
    tokens = cycle * (turns + SHORTEST)
    draft = drafted(NgramDrafter(), tokens, 12)
    expected = (tokens * 12)[len(tokens) :][:12]
    assert draft.tokens == expected
    assert len(draft.odds) == 12 and all(0.0 < odds < 1.0 for odds in draft.odds)


def test_what_does_not_repeat_itself_has_no_drafts() -> None:
    assert drafted(NgramDrafter(), range(500)) == Draft()
    assert len(drafted(NgramDrafter(), [*range(40)] * 2, 100).tokens) == MOST_DRAFTS


def test_odds_follow_what_came_true_though_nothing_was_computed() -> None:
    drafter = NgramDrafter()
    unlike: list[int] = []
    for turn in range(60):
        # The same three tokens, and then another one each time.
        for token in (1, 2, 3, 100 + turn):
            unlike.append(token)
            drafted(drafter, unlike)
    assert drafted(drafter, [*unlike, 1, 2, 3]).odds[0] < 0.2
    other = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16] * 2
    for size in range(1, len(other) + 1):
        drafted(drafter, other[:size], number=1)
    repeated = drafted(drafter, [*other, 5, 6], number=1)
    assert repeated.tokens[:3] == [7, 8, 9]
    assert repeated.odds[0] > 0.6


def test_a_long_prompt_is_taken_up_in_parts_beside_others() -> None:
    drafter = NgramDrafter()
    long, short = [*range(MOST_TAKEN_UP), 5, 6, 7], [1, 2, 3, 4, 1, 2, 3]
    wishes = [Wish(0, short, 4), Wish(1, long, 4), Wish(2, short, 4)]
    found = drafter.draft(wishes, Prices())
    assert found[0].tokens == [4, 1, 2, 3]
    assert [draft.tokens for draft in found[1:]] == [(), ()]
    assert [list(draft.tokens) for draft in drafter.draft(wishes, Prices())] == [
        [4, 1, 2, 3],
        [8, 9, 10, 11],
        [4, 1, 2, 3],
    ]


def test_nothing_is_kept_of_what_has_ended() -> None:
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 4, 1, 2, 3]
    drafted(drafter, tokens)
    drafter.forget(0)
    drafter.forget(0)
    assert drafted(drafter, [7, 8, 9]) == Draft()


@pytest.mark.parametrize("count", [1, 31, 5000])
def test_what_was_not_shown_is_taken_up_later(count: int) -> None:
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 4, 1, 2, 3]
    drafted(drafter, tokens)
    more = [*tokens, *range(10, 10 + count), 1, 2, 3]
    assert drafted(drafter, more, 2).tokens == [10, 11] if count > 1 else [10, 1]
