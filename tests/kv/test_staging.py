"""A buffer is free only when both its owners let go; shares and order of waiting hold."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from batonlm.core.errors import Overloaded
from batonlm.transfer import staging
from batonlm.transfer.staging import HostMemory, StagingBuffer, StagingPool
from tests.depth import examples

PEERS = ("a", "b", "c")


class RingMachine(RuleBasedStateMachine):
    """Drives a ring against a model: who holds what, and what transfers may still write to."""

    held = Bundle("held")
    lent = Bundle("lent")
    orphaned = Bundle("orphaned")

    def __init__(self) -> None:
        super().__init__()
        self.ring = StagingPool(6, 4096)
        self.owners: dict[int, tuple[str, bool]] = {}
        self.num_orphaned = 0
        self.was_exhausted = False

    @rule(target=held, peer=st.sampled_from(PEERS), landing=st.booleans())
    def take(self, peer: str, landing: bool) -> object:
        """The last buffer is never one to land in."""
        buffer = self.ring.take(peer, landing=landing)
        mine = sum(owner == (peer, landing) for owner in self.owners.values())
        to_land_in = sum(lands for _, lands in self.owners.values())
        full = len(self.owners) == 6 or (landing and to_land_in == 5)
        assert (buffer is None) == (mine == 3 or full)
        if buffer is None:
            return multiple()
        assert buffer.index not in self.owners
        self.owners[buffer.index] = peer, landing
        return buffer

    @rule(buffer=consumes(held))
    def release(self, buffer: StagingBuffer) -> None:
        buffer.release()
        del self.owners[buffer.index]

    @rule(target=lent, buffer=consumes(held))
    def lend(self, buffer: StagingBuffer) -> StagingBuffer:
        buffer.lend()
        return buffer

    @rule(target=held, buffer=consumes(lent))
    def settle(self, buffer: StagingBuffer) -> StagingBuffer:
        buffer.settle()
        return buffer

    @rule(target=orphaned, buffer=consumes(lent))
    def release_while_lent(self, buffer: StagingBuffer) -> StagingBuffer:
        buffer.release()
        self.num_orphaned += 1
        return buffer

    @rule(buffer=consumes(orphaned))
    def settle_orphaned(self, buffer: StagingBuffer) -> None:
        buffer.settle()
        self.num_orphaned -= 1
        del self.owners[buffer.index]

    @invariant()
    def counts_agree(self) -> None:
        assert self.ring.num_free == 6 - len(self.owners)
        assert self.ring.num_orphaned == self.num_orphaned
        assert self.ring.exhausted == (self.num_orphaned >= 2)
        self.was_exhausted |= self.ring.exhausted
        assert self.ring.no_orphaned.is_set() == (self.num_orphaned == 0)
        assert self.ring.exhausted_event.is_set() == self.was_exhausted, "it is final"

    def teardown(self) -> None:
        self.ring.close()


RingMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestRing = RingMachine.TestCase


def test_views_are_disjoint_aligned_and_shared_with_the_file() -> None:
    ring = StagingPool(3, 8192)
    buffer = ring.take("a")
    assert buffer is not None
    assert ring.memory.regions[0].address % 4096 == 0
    buffer.view[:] = bytes([7]) * 8192
    assert isinstance(ring.memory, HostMemory)
    whole = os.pread(ring.memory.fd, 3 * 8192, 0)
    start = buffer.index * 8192
    assert whole[start : start + 8192] == bytes([7]) * 8192
    assert whole.count(7) == 8192
    ring.close()
    ring.close()


def test_releasing_twice_is_a_bug_that_shows() -> None:
    ring = StagingPool(2, 4096)
    buffer = ring.take("a")
    assert buffer is not None
    buffer.release()
    with pytest.raises(RuntimeError, match="free cannot be released"):
        buffer.release()
    with pytest.raises(RuntimeError, match="free cannot be lent"):
        buffer.lend()


@pytest.mark.parametrize(("num_buffers", "buffer_bytes"), [(1, 4096), (2, 100), (2, 0), (2, 5000)])
def test_impossible_rings_are_refused(num_buffers: int, buffer_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        StagingPool(num_buffers, buffer_bytes)


async def test_waiting_is_in_order_among_those_below_their_share() -> None:
    ring = StagingPool(4, 4096)
    first = [ring.take("a"), ring.take("a")]
    others = [ring.take("b"), ring.take("b")]
    order: list[str] = []

    async def waits(name: str, peer: str) -> StagingBuffer:
        buffer = await ring.wait(peer)
        order.append(name)
        return buffer

    tasks = []
    for name, peer in (("a1", "a"), ("c1", "c"), ("c2", "c")):
        tasks.append(asyncio.create_task(waits(name, peer)))
        await asyncio.sleep(0)
    for buffer in others:
        assert buffer is not None
        buffer.release()
    await asyncio.gather(*tasks[1:])
    assert order == ["c1", "c2"]
    assert first[0] is not None
    first[0].release()
    await tasks[0]
    assert order == ["c1", "c2", "a1"]


async def test_a_cancelled_wait_takes_nothing() -> None:
    ring = StagingPool(2, 4096)
    taken = [ring.take("a"), ring.take("a")]
    waiting = asyncio.create_task(ring.wait("b"))
    await asyncio.sleep(0)
    assert taken[0] is not None
    taken[0].release()
    # The buffer is promised already, and the one who waits is cancelled before it could run.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ring.num_free == 1


async def test_the_number_of_waiters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_WAITING", 1)
    ring = StagingPool(2, 4096)
    assert ring.take("a") and ring.take("a")
    waiting = asyncio.create_task(ring.wait("b"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await ring.wait("c")
    waiting.cancel()
