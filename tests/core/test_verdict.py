"""A verdict changes only after so many observations in a row against it, in both directions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.routing.failures import SteadyVerdict


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_only_a_row_against_it_changes_it(patience: int, seen: list[bool]) -> None:
    verdict, expected = SteadyVerdict(patience), True
    for end in range(1, len(seen) + 1):
        recent = seen[max(0, end - patience) : end]
        changes = len(recent) == patience and all(one is not expected for one in recent)
        assert verdict.observe(seen[end - 1]) == changes
        expected ^= changes
        assert verdict.good == expected


def test_taking_turns_changes_nothing() -> None:
    verdict = SteadyVerdict()
    assert not any(verdict.observe(good) for good in [False, True] * 20)
    assert verdict.good
