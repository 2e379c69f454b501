"""Every interleaving of two hand-overs with every pair of faults keeps the promises; what is wrong
on purpose is found."""

from __future__ import annotations

import numpy as np
import pytest

from batonlm.core.handover.table import ReceiverState, SenderState
from tests.core.handover_known import FULL_SIZE, Known, Size
from tests.core.handover_parts import Broken, Mutation
from tests.core.handover_world import Explorer

COMPLETED = (SenderState.COMPLETED.value, ReceiverState.COMPLETED.value)
SMALL = Size(num_positions=2)
WITH_STATE = Size(num_positions=2, state_positions=1)
PREFIX = Size(num_positions=2, is_prefix=True)
DYING = (SenderState.OFFERED, SenderState.OPENED, SenderState.ANNOUNCED, SenderState.GIVING)
TAKING = (ReceiverState.OPENING, ReceiverState.RESERVING, ReceiverState.TAKING)
FAILED = (SenderState.FAILED.value, ReceiverState.FAILED.value)
OF_PREFIXES = (Mutation.EVICT_WHILE_OFFERED, Mutation.UNPACK_OUT_OF_ORDER)
"""What can go wrong with these only."""


@pytest.mark.parametrize("size", [FULL_SIZE, WITH_STATE], ids=["KV", "KV and state"])
def test_without_faults_both_hand_overs_complete(size: Size) -> None:
    explorer = Explorer(Known(size=size), max_faults=0)
    explorer.run()
    assert explorer.states > 10_000
    assert explorer.ends == {frozenset({COMPLETED})}


def test_without_faults_a_prefix_is_collected_as_far_as_the_cache_has_it() -> None:
    explorer = Explorer(Known(size=PREFIX), max_faults=0)
    explorer.run()
    # It was evicted before it was pinned, of both, of one or of none.
    assert explorer.ends == {
        frozenset({COMPLETED}),
        frozenset({COMPLETED, FAILED}),
        frozenset({FAILED}),
    }


def test_with_a_fault_a_prefix_ends_in_these_ways_and_what_came_has_no_gap() -> None:
    """Its sender evicts, or dies or runs out of time before, amid or after its KV chunks."""
    explorer = Explorer(Known(size=PREFIX), max_faults=1)
    explorer.run()
    sender, receiver = SenderState, ReceiverState
    assert {pair for ends in explorer.ends for pair in ends} == {
        (one.value, other.value)
        for one, other in (
            (sender.COMPLETED, receiver.COMPLETED),
            (sender.REFUSED, receiver.FULL),
            (sender.FAILED, receiver.FAILED),
            # The sender died.
            *((each, receiver.FAILED) for each in DYING),
            # The receiver died, or its last word came too late.
            *((sender.FAILED, each) for each in (*TAKING, receiver.COMPLETED)),
            # The sender died when all was here.
            *((each, receiver.COMPLETED) for each in (sender.GIVING, sender.GIVEN)),
        )
    }


@pytest.mark.deep
@pytest.mark.parametrize(
    "size", [FULL_SIZE, WITH_STATE, PREFIX], ids=["KV", "KV and state", "prefix"]
)
def test_with_two_faults_every_promise_holds(
    size: Size, capsys: pytest.CaptureFixture[str]
) -> None:
    explorer = Explorer(Known(size=size), max_faults=2)
    explorer.run()
    with capsys.disabled():
        print(f"\n{explorer.states:,} states, {explorer.transitions:,} transitions")
    assert explorer.states > (200_000 if size.is_prefix else 1_000_000)
    assert frozenset({COMPLETED}) in explorer.ends


@pytest.mark.deep
@pytest.mark.parametrize("mutation", Mutation)
def test_what_is_wrong_on_purpose_is_found(mutation: Mutation) -> None:
    size = PREFIX if mutation in OF_PREFIXES else FULL_SIZE
    with pytest.raises(Broken):
        Explorer(Known(mutation, size), max_faults=1).run()


@pytest.mark.parametrize("mutation", OF_PREFIXES)
def test_what_is_wrong_with_prefixes_is_found(mutation: Mutation) -> None:
    with pytest.raises(Broken):
        Explorer(Known(mutation, PREFIX), max_faults=0).run()


def test_a_state_that_is_given_before_its_input_is_computed_is_found() -> None:
    with pytest.raises(Broken, match="not computed"):
        Explorer(Known(Mutation.FINISH_EARLY, WITH_STATE), max_faults=0).run()


def test_nothing_is_missed_by_exploring_one_of_those_that_differ_in_names() -> None:
    known = Known(size=SMALL)
    whole, reduced = (Explorer(known, 1, symmetric=symmetric) for symmetric in (False, True))
    whole.run()
    reduced.run()
    assert whole.states > 4 * reduced.states
    assert np.array_equal(whole.reached(), reduced.reached())
    assert whole.ends == reduced.ends


@pytest.mark.deep
@pytest.mark.parametrize("mutation", Mutation)
def test_names_hide_nothing_that_is_wrong(mutation: Mutation) -> None:
    def is_found(symmetric: bool) -> bool:
        try:
            size = PREFIX if mutation in OF_PREFIXES else SMALL
            Explorer(Known(mutation, size), 1, symmetric=symmetric).run()
        except Broken:
            return True
        return False

    assert is_found(symmetric=False) == is_found(symmetric=True)
