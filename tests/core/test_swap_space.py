"""SwapSpace: every block is free, granted, or waits for a step, whatever is called when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.kvcache.block_pool import SwapGrant, SwapPlace, SwapSpace

HOST, DISK = SwapPlace.HOST, SwapPlace.DISK
CALLS = ["take", "release", "launch", "complete"]


def test_host_memory_goes_first_then_disk_then_nothing() -> None:
    space = SwapSpace(4, 6)
    assert space.place_for(3) is HOST
    first = space.take(HOST, 3)
    assert first.blocks == (0, 1, 2)
    assert space.place_for(2) is DISK, "a grant is of one kind"
    assert space.take(DISK, 5).blocks == (4, 5, 6, 7, 8), "ids go on behind the host's"
    assert space.place_for(1) is HOST
    assert space.place_for(2) is None
    space.release(first)
    assert space.num_free[0] == 4
    space.check()


def test_without_swap_memory_there_is_no_place() -> None:
    space = SwapSpace()
    assert space.place_for(1) is None
    with pytest.raises(ValueError, match="cannot be taken"):
        space.take(HOST, 1)
    with pytest.raises(ValueError, match="at least one block"):
        SwapSpace(-1, 0)


def test_a_grant_is_released_exactly_once() -> None:
    space = SwapSpace(4)
    grant = space.take(HOST, 2)
    space.release(grant)
    with pytest.raises(RuntimeError):
        space.release(grant)


def test_blocks_that_a_step_may_touch_are_free_only_after_it() -> None:
    space = SwapSpace(4)
    grant = space.take(HOST, 4)
    space.launched(1)
    space.launched(2)
    space.release(grant)
    space.completed(1)
    assert space.num_free[0] == 0
    space.check()
    space.completed(2)
    assert space.num_free[0] == 4


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 9))),
)
def test_nothing_is_lost_or_doubled(host: int, disk: int, calls: list[tuple[str, int]]) -> None:
    space = SwapSpace(host, disk)
    grants: list[SwapGrant] = []
    launched = completed = 0
    for call, number in calls:
        if call == "take" and number and (place := space.place_for(number)):
            grants.append(space.take(place, number))
        elif call == "release" and grants:
            space.release(grants.pop(number % len(grants)))
        elif call == "launch":
            launched += 1
            space.launched(launched)
        elif call == "complete" and completed < launched:
            completed += 1
            space.completed(completed)
        space.check()
        assert space.num_grants == len(grants)
        owned = [block for grant in grants for block in grant.blocks]
        assert len(set(owned)) == len(owned)
    for grant in grants:
        space.release(grant)
    if completed < launched:
        space.completed(launched)
    assert space.num_free == (host, disk) and space.num_used == (0, 0)
