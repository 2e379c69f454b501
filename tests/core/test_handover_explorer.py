"""Every interleaving of two hand-overs with every pair of faults keeps the promises; what is wrong
on purpose is found."""

from __future__ import annotations

import pytest

from baton.core.handover import CollectorState, GiverState
from tests.core.handover_parts import Broken, Mutation
from tests.core.handover_world import Explorer

COMPLETED = (GiverState.COMPLETED.value, CollectorState.COMPLETED.value)


def test_without_faults_both_hand_overs_complete() -> None:
    explorer = Explorer(max_faults=0)
    explorer.run()
    assert explorer.states > 10_000
    assert explorer.rests == {frozenset({COMPLETED})}


@pytest.mark.parametrize(
    ("faults", "least"), [(1, 2_000_000), pytest.param(2, 10_000_000, marks=pytest.mark.slow)]
)
def test_with_faults_every_promise_holds(
    faults: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    explorer = Explorer(max_faults=faults)
    explorer.run()
    with capsys.disabled():
        print(
            f"\n{faults} faults: {explorer.states:,} states, {explorer.transitions:,} transitions"
        )
    assert explorer.states > least
    assert frozenset({COMPLETED}) in explorer.rests


@pytest.mark.parametrize("mutation", Mutation)
def test_what_is_wrong_on_purpose_is_found(mutation: Mutation) -> None:
    with pytest.raises(Broken):
        Explorer(max_faults=1, mutation=mutation).run()
