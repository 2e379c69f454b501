"""Scheduler: prefixes that other workers collect, and prefixes that come from other workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import Overloaded
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import Attempt
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.prefixes import MAX_ARRIVING, MAX_OFFERED, PrefixBlocks
from tests.core.attempts import (
    BLOCK_SIZE,
    Outputs,
    attempt,
    decode_loop,
    expected,
    packed,
    run_out,
    started,
    unpacked,
)


def prefix_of(one: Attempt, size: int | None = None) -> Prefix:
    return Prefix(one.token_ids[:size], one.cache_salt, one.adapter)


def computed(loop: EngineLoop, one: Attempt) -> None:
    loop.scheduler.add(one, 0.0)
    run_out(loop)


def moved(giver: EngineLoop, receiver: EngineLoop, one: Attempt, end: int = 1000) -> PrefixBlocks:
    """What a transfer does; it ends after the position `end`."""
    given = giver.scheduler.offer_prefix(prefix_of(one))
    assert given is not None
    prefix = prefix_of(one, given.num_positions)
    taken = receiver.scheduler.expect_prefix(prefix, 0.0)
    assert taken is not None
    end = min(end, given.num_positions)
    kv = packed(giver.runner, given.extents, taken.cached, end)
    unpacked(receiver.runner, taken.extents, taken.cached, end, kv)
    giver.scheduler.release_prefix(given)
    receiver.scheduler.release_prefix(taken, end)
    return taken


@pytest.mark.parametrize(("end", "found"), [(1000, 16), (13, 12), (3, 0)])
def test_only_what_did_not_come_is_computed(end: int, found: int) -> None:
    giver, receiver = decode_loop(), decode_loop()
    computed(giver, attempt("before", size=18))
    one = attempt("after", size=22, n=2)
    assert moved(giver, receiver, one, end).num_positions == 16
    receiver.scheduler.add(one, 0.0)
    events = run_out(receiver)
    assert started(events)[0].cached_tokens == found
    assert Outputs().take(events).of(one) == expected(one)


def test_what_is_here_already_is_not_needed() -> None:
    giver, receiver = decode_loop(), decode_loop()
    computed(giver, attempt("before", size=22))
    computed(receiver, attempt("other", size=9))
    assert moved(giver, receiver, attempt("after", size=30)).cached == 8


@pytest.mark.parametrize("other", [{"cache_salt": b"x"}, {"adapter": "a" * 64}])
def test_what_belongs_to_another_tenant_or_adapter_is_not_found(other: dict[str, object]) -> None:
    loop = decode_loop()
    one = attempt(size=18)
    computed(loop, one)
    assert loop.scheduler.offer_prefix(prefix_of(replace(one, **other))) is None  # type: ignore[arg-type]


def test_a_state_goes_with_no_prefix() -> None:
    loop = decode_loop(state_positions=6)
    one = attempt(size=18)
    computed(loop, one)
    assert loop.scheduler.offer_prefix(prefix_of(one)) is None
    assert loop.scheduler.expect_prefix(prefix_of(one), 0.0) is None


def test_what_is_on_offer_is_not_evicted() -> None:
    loop = decode_loop(num_blocks=8)
    one = attempt(size=18, max_tokens=1)
    computed(loop, one)
    given = loop.scheduler.offer_prefix(prefix_of(one))
    assert given is not None and given.num_positions == 16
    kv = packed(loop.runner, given.extents, 0, 16)
    loop.scheduler.add(attempt("large", size=20, seed=1, max_tokens=1), 0.0)
    loop.step(0.0)
    assert loop.scheduler.load.waiting_sequences == 1, "there is no room beside it"
    assert packed(loop.runner, given.extents, 0, 16) == kv
    loop.scheduler.release_prefix(given)
    run_out(loop)
    assert loop.scheduler.load.free_blocks == 8


def test_both_directions_are_bounded() -> None:
    loop = decode_loop()
    one = attempt(size=18)
    computed(loop, one)
    offered = [loop.scheduler.offer_prefix(prefix_of(one)) for _ in range(MAX_OFFERED)]
    with pytest.raises(Overloaded):
        loop.scheduler.offer_prefix(prefix_of(one))
    loop.idle_check()
    arriving = [loop.scheduler.expect_prefix(prefix_of(one, 8), 0.0) for _ in range(MAX_ARRIVING)]
    assert loop.scheduler.expect_prefix(prefix_of(one, 8), 0.0) is None
    for blocks in (*offered, *arriving):
        assert blocks is not None
        loop.scheduler.release_prefix(blocks)
    loop.idle_check()
    assert loop.scheduler.load.free_blocks == 64


def test_no_room_is_made_for_a_prefix() -> None:
    loop = decode_loop(num_blocks=8)
    loop.scheduler.add(attempt("runs", size=18, max_tokens=9), 0.0)
    loop.step(0.0)
    assert loop.scheduler.expect_prefix(prefix_of(attempt(size=20, seed=1)), 0.0) is None
    small = loop.scheduler.expect_prefix(prefix_of(attempt(size=BLOCK_SIZE, seed=1)), 0.0)
    assert small is not None, "one block is left beside what it still needs"
    loop.scheduler.release_prefix(small)
    run_out(loop)
