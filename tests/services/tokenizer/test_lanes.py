"""Short inputs share a thread's turn, long ones leave room; nobody's failure is another's."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from batonlm.tokenizer.servicer import (
    BATCH_BYTES,
    BATCH_JOBS,
    LONG_BYTES,
    LONG_NICE,
    BatchExecutor,
    give_way,
)

PATIENCE_S = 120.0


class Gate:
    """Work on names, which may wait until it opens."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.batches: list[list[str]] = []

    def work(self, names: Sequence[str]) -> Sequence[str | Exception]:
        """Gives names back as they are; those that end in ? wait, those that end in ! fail."""
        self.batches.append(list(names))
        if any(name.endswith("?") for name in names):
            assert self.open.wait(PATIENCE_S)
        return [ValueError(name) if name.endswith("!") else name for name in names]

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.names) < count:  # noqa: ASYNC110 (threads change it)
                await asyncio.sleep(0.002)

    @property
    def names(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def started(lanes: BatchExecutor, gate: Gate, name: str, size: int = 1) -> asyncio.Future[str]:
    return asyncio.ensure_future(lanes.run(gate.work, name, size))


async def test_long_ones_leave_a_thread_to_short_ones(gate: Gate) -> None:
    with ThreadPoolExecutor(2) as executor:
        lanes = BatchExecutor(executor, 2, cores=2)
        long = [started(lanes, gate, f"long {n}?", LONG_BYTES) for n in range(3)]
        await gate.until_begun(1)
        short = [f"short {n}" for n in range(200)]
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*(started(lanes, gate, name) for name in short)) == short
        assert [name for name in gate.names if "long" in name] == ["long 0?"]
        gate.open.set()
        assert await asyncio.gather(*long) == ["long 0?", "long 1?", "long 2?"]


async def test_on_one_core_short_ones_go_one_batch_at_a_time_and_a_long_one_beside(
    gate: Gate,
) -> None:
    with ThreadPoolExecutor(3) as executor:
        lanes = BatchExecutor(executor, 3, cores=1)
        short = [started(lanes, gate, f"short {n}?", BATCH_BYTES) for n in range(3)]
        await gate.until_begun(1)
        long = started(lanes, gate, "long", LONG_BYTES)
        assert await long == "long"
        assert gate.names == ["short 0?", "long"]
        gate.open.set()
        assert await asyncio.gather(*short) == ["short 0?", "short 1?", "short 2?"]


async def test_short_ones_do_not_keep_a_long_one_waiting(gate: Gate) -> None:
    with ThreadPoolExecutor(1) as executor:
        lanes = BatchExecutor(executor, 1, cores=1)
        first = started(lanes, gate, "first?")
        await gate.until_begun(1)
        short = [started(lanes, gate, f"short {n}", BATCH_BYTES) for n in range(9)]
        long = started(lanes, gate, "long", LONG_BYTES)
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *short, long)
        assert gate.batches == [["first?"], ["long"], *([f"short {n}"] for n in range(9))]


async def test_what_waits_is_one_batch(gate: Gate) -> None:
    """Of at most so many, so that the loop hears of them in time."""
    with ThreadPoolExecutor(1) as executor:
        lanes = BatchExecutor(executor, 1, cores=1)
        first = started(lanes, gate, "first?")
        await gate.until_begun(1)
        others = [started(lanes, gate, str(n)) for n in range(2 * BATCH_JOBS)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)
        assert [len(batch) for batch in gate.batches] == [1, BATCH_JOBS, BATCH_JOBS]
        assert gate.names[1:] == [str(n) for n in range(2 * BATCH_JOBS)]


async def test_each_fails_and_leaves_by_itself(gate: Gate) -> None:
    with ThreadPoolExecutor(1) as executor:
        lanes = BatchExecutor(executor, 1, cores=1)
        first = started(lanes, gate, "first?")
        await gate.until_begun(1)
        failing, leaving, fine = (started(lanes, gate, name) for name in ("bad!", "gone", "fine"))
        await asyncio.sleep(0)
        leaving.cancel()
        gate.open.set()
        with pytest.raises(ValueError, match="bad!"):
            await failing
        assert await first == "first?" and await fine == "fine"
        assert gate.batches == [["first?"], ["bad!", "fine"]]


async def test_work_that_raises_ends_nobody_elses_wait(gate: Gate) -> None:
    def broken(items: Sequence[str]) -> Sequence[str]:
        raise ZeroDivisionError

    with ThreadPoolExecutor(1) as executor:
        lanes = BatchExecutor(executor, 1, cores=1)
        with pytest.raises(ZeroDivisionError):
            await lanes.run(broken, "item", 1)
        assert await lanes.run(gate.work, "fine", 1) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
async def test_threads_of_long_inputs_give_way_to_all_others() -> None:
    def priorities(items: Sequence[str]) -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())] * len(items)

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with (
        ThreadPoolExecutor(1) as executor,
        ThreadPoolExecutor(1, initializer=give_way) as long_executor,
    ):
        lanes = BatchExecutor(executor, 2, cores=2, long_executor=long_executor)
        assert await lanes.run(priorities, "long", LONG_BYTES) == max(usual, LONG_NICE)
        assert await lanes.run(priorities, "short", 1) == usual
