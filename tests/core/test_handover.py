"""The hand-over's table is complete, and its two sides refuse what is out of place."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import HandoverFailed
from batonlm.core.handover.table import (
    ENDS,
    LIMITS,
    TRANSITIONS,
    HandoverEvent,
    KvChunkRange,
    ReceiverSide,
    ReceiverState,
    SenderSide,
    SenderState,
    State,
    follow,
)

STATES: list[State] = [*SenderState, *ReceiverState]
FAULTS = (
    HandoverEvent.CANCEL,
    HandoverEvent.PEER_FAILED,
    HandoverEvent.PEER_LOST,
    HandoverEvent.DEADLINE,
)


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_an_owner_and_a_deadline_or_is_an_end(state: State) -> None:
    if state in ENDS:
        assert state not in LIMITS
        assert not [key for key in TRANSITIONS if key[0] is state]
    else:
        assert LIMITS[state].owner
        assert 0 < LIMITS[state].seconds <= 600


@pytest.mark.parametrize("state", [s for s in STATES if s not in ENDS])
@pytest.mark.parametrize("event", FAULTS)
def test_every_fault_ends_every_state(state: State, event: HandoverEvent) -> None:
    assert follow(state, event) is type(state)["FAILED"]


def test_the_table_never_crosses_sides_and_every_state_is_reached() -> None:
    assert all(type(source) is type(target) for (source, _), target in TRANSITIONS.items())
    reached = {*TRANSITIONS.values(), SenderState.OFFERED, ReceiverState.OPENING}
    assert reached == set(STATES)


def test_only_progress_stays_in_its_state_and_no_other_path_returns() -> None:
    edges = {(a, b) for (a, event), b in TRANSITIONS.items() if event is not HandoverEvent.PROGRESS}
    for _ in STATES:
        edges |= {(a, d) for (a, b), (c, d) in itertools.product(edges, edges) if b is c}
    assert all(a is not b for a, b in edges)
    stays = {event for (a, event), b in TRANSITIONS.items() if a is b}
    assert stays == {HandoverEvent.PROGRESS}


@pytest.mark.parametrize(
    ("state", "event"),
    [key for key in itertools.product(STATES, HandoverEvent) if key not in TRANSITIONS],
)
def test_everything_else_is_refused(state: State, event: HandoverEvent) -> None:
    with pytest.raises(HandoverFailed, match="out of place"):
        follow(state, event)


def giving(num_positions: int = 10, positions_per_kv_chunk: int = 4) -> SenderSide:
    side = SenderSide(num_positions)
    side.opened(positions_per_kv_chunk)
    side.announced()
    side.granted(0)
    return side


def taking(num_positions: int = 10, positions_per_kv_chunk: int = 4) -> ReceiverSide:
    side = ReceiverSide(num_positions, positions_per_kv_chunk)
    side.announced(num_positions)
    side.granted(0)
    return side


@given(st.integers(1, 200), st.integers(1, 50))
def test_kv_chunks_are_as_few_as_can_be_and_alike(
    num_positions: int, positions_per_kv_chunk: int
) -> None:
    fewest = -(-num_positions // positions_per_kv_chunk)
    side = giving(num_positions, positions_per_kv_chunk)
    side.advanced(num_positions)
    side.credited(fewest)
    sizes = []
    while (run := side.next_chunk()) is not None:
        sizes.append(run.num_positions)
    assert sum(sizes) == num_positions and len(sizes) == fewest
    assert max(sizes) - min(sizes) <= 1


def test_kv_chunks_follow_each_other_within_finished_positions_and_credits() -> None:
    side = giving()
    assert side.next_chunk() is None
    assert side.advanced(6)
    assert not side.advanced(6)
    assert side.next_chunk() is None
    side.credited(2)
    assert side.next_chunk() == KvChunkRange(0, 0, 3)
    assert side.next_chunk() == KvChunkRange(1, 3, 3)
    assert side.next_chunk() is None
    assert side.advanced(10)
    side.credited(1)
    assert side.next_chunk() == KvChunkRange(2, 6, 4)


def test_cached_positions_are_not_sent() -> None:
    side = SenderSide(10)
    side.opened(4)
    side.announced()
    side.granted(7)
    assert not side.advanced(5)
    assert side.advanced(10)
    side.credited(1)
    assert side.next_chunk() == KvChunkRange(0, 7, 3)


@pytest.mark.parametrize("from_position", [-1, 11])
def test_a_grant_outside_the_input_is_refused(from_position: int) -> None:
    side = SenderSide(10)
    side.opened(4)
    side.announced()
    with pytest.raises(HandoverFailed):
        side.granted(from_position)


def test_credits_beyond_what_is_finished_are_refused() -> None:
    side = giving()
    side.advanced(5)
    with pytest.raises(HandoverFailed, match="do not exist"):
        side.credited(3)


@pytest.mark.parametrize("index", [0, 1, 7])
def test_only_kv_chunks_that_were_sent_can_be_collected(index: int) -> None:
    side = giving()
    side.advanced(4)
    side.credited(1)
    assert side.next_chunk() is not None
    with pytest.raises(HandoverFailed, match="was not sent"):
        side.collected(index)


def test_a_receiver_whose_buffers_hold_no_position_is_refused() -> None:
    with pytest.raises(HandoverFailed, match="smaller than one position"):
        SenderSide(10).opened(0)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 40), st.integers(1, 12))
def test_a_state_follows_the_last_position_in_kv_chunks_of_its_own(
    num_positions: int, cached: int, state_positions: int, per_kv_chunk: int
) -> None:
    """And a receiver that credits what it sees finished credits all of them, and no more."""
    sender = SenderSide(num_positions, state_positions=state_positions)
    receiver = ReceiverSide(num_positions, per_kv_chunk, state_positions=state_positions)
    cached = min(cached, num_positions)
    sender.opened(per_kv_chunk)
    sender.announced()
    sender.granted(cached)
    receiver.announced(num_positions)
    receiver.granted(cached)
    assert sender.advanced(num_positions)
    receiver.advanced(sender.finished)
    while receiver.wants_credit:
        receiver.credited()
        sender.credited(1)
    runs = []
    while (run := sender.next_chunk()) is not None:
        receiver.arriving(run)
        runs.append(run)
    assert [
        p for r in runs for p in range(r.first_position, r.first_position + r.num_positions)
    ] == [*range(cached, num_positions + state_positions)]
    assert not any(
        r.first_position < num_positions < r.first_position + r.num_positions for r in runs
    )
    for run in runs:
        assert not sender.wants_tokens
        sender.sent(run.index)
        receiver.landed(run.index)
    assert sender.wants_tokens and receiver.credits == sender.credits == 0
    receiver.tokens()
    assert receiver.all_in


def test_positions_of_an_input_and_of_its_state_in_one_kv_chunk_are_refused() -> None:
    side = ReceiverSide(10, 8, state_positions=4)
    side.announced(10)
    side.granted(6)
    side.advanced(14)
    side.credited()
    with pytest.raises(HandoverFailed, match="not finished"):
        side.arriving(KvChunkRange(0, 6, 8))
    side.arriving(KvChunkRange(0, 6, 4))


def test_a_grant_inside_the_state_is_refused() -> None:
    side = SenderSide(10, state_positions=4)
    side.opened(4)
    side.announced()
    with pytest.raises(HandoverFailed):
        side.granted(11)


def test_token_0_is_the_senders_last_word() -> None:
    side = giving(num_positions=4)
    side.advanced(4)
    side.credited(1)
    run = side.next_chunk()
    assert run is not None and not side.wants_tokens
    side.sent(run.index)
    assert side.wants_tokens
    side.tokens()
    with pytest.raises(HandoverFailed):
        side.tokens()
    assert side.state is SenderState.GIVING
    side.collected(run.index)
    assert side.state is SenderState.GIVEN


def test_the_receiver_wants_credits_for_finished_positions_only() -> None:
    side = taking()
    assert not side.wants_credit
    side.advanced(5)
    side.credited()
    assert side.wants_credit
    side.credited()
    assert not side.wants_credit


@pytest.mark.parametrize(
    "run",
    [
        KvChunkRange(1, 0, 4),
        KvChunkRange(0, 1, 4),
        KvChunkRange(0, 0, 5),
        KvChunkRange(0, 0, 0),
    ],
)
def test_kv_chunks_out_of_order_or_too_large_are_refused(run: KvChunkRange) -> None:
    side = taking()
    side.advanced(10)
    side.credited()
    with pytest.raises(HandoverFailed):
        side.arriving(run)
    assert side.credits == 1 and not side.landing


def test_a_kv_chunk_of_unfinished_positions_is_refused() -> None:
    side = taking()
    side.advanced(3)
    side.credited()
    with pytest.raises(HandoverFailed, match="not finished"):
        side.arriving(KvChunkRange(0, 0, 4))


def test_a_kv_chunk_without_credit_is_refused() -> None:
    side = taking()
    side.advanced(10)
    with pytest.raises(HandoverFailed, match="credit"):
        side.arriving(KvChunkRange(0, 0, 4))


@pytest.mark.parametrize("finished", [0, 3, 11])
def test_finished_positions_only_grow_within_the_input(finished: int) -> None:
    side = taking()
    side.advanced(3)
    with pytest.raises(HandoverFailed, match="out of order"):
        side.advanced(finished)


def test_another_input_is_refused() -> None:
    side = ReceiverSide(10, 4)
    with pytest.raises(HandoverFailed, match="another input"):
        side.announced(11)


def test_an_ended_side_makes_no_kv_chunk_and_wants_no_credit() -> None:
    sender, receiver = giving(), taking()
    sender.advanced(10)
    receiver.advanced(10)
    sender.credited(2)
    sender.end(HandoverEvent.PEER_LOST)
    receiver.end(HandoverEvent.DEADLINE)
    assert sender.ended and sender.next_chunk() is None and not sender.wants_tokens
    assert receiver.ended and not receiver.wants_credit and not receiver.all_in
    sender.end(HandoverEvent.CANCEL)
    assert sender.state is SenderState.FAILED
