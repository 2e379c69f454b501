"""When the text of new tokens is asked for, and what is done later, without any worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from batonlm.core.request.attempt import TokenLog
from batonlm.core.request.request import FinishReason
from batonlm.router.request.pacing import TICK_S, DeferredCalls, LoadMonitor, TokenCoalescer

PATIENCE_S = 120.0


class Asked:
    """Two choices whose detokenizer only listens."""

    def __init__(self, interval_s: float, *, searched: bool = False) -> None:
        self.pace = LoadMonitor(0.5)
        self.pace.interval_s = interval_s
        self.later = DeferredCalls()
        self.logs = [TokenLog(0), TokenLog(1)]
        self.choices: list[int] = []
        self.heard = asyncio.Event()
        self.asking = TokenCoalescer(self.logs, self._ask, self.pace, self.later, searched=searched)

    def _ask(self, choice: int) -> None:
        self.choices.append(choice)
        self.heard.set()


@pytest.fixture
async def busy() -> AsyncIterator[Asked]:
    """A router so busy that events are hours apart."""
    made = Asked(1e4)
    yield made
    made.later.close()


async def test_with_time_to_spare_every_token_is_asked_for() -> None:
    asked = Asked(0.0)
    asked.asking.emitted()
    asked.asking.came(0)
    asked.asking.came(0)
    assert asked.choices == [0, 0]
    assert asked.asking.early_s <= 0


async def test_the_first_tokens_do_not_wait(busy: Asked) -> None:
    busy.asking.came(0)
    busy.asking.came(1)
    assert busy.choices == [0, 1]


async def test_later_ones_wait_and_the_last_do_not(busy: Asked) -> None:
    busy.asking.emitted()
    busy.asking.came(0)
    busy.asking.came(1)
    assert busy.choices == []
    assert busy.asking.early_s > 0
    busy.logs[1].finish_reason = FinishReason.LENGTH
    busy.asking.came(1)
    assert busy.choices == [1]


async def test_with_stop_strings_nothing_waits() -> None:
    asked = Asked(1e4, searched=True)
    asked.asking.emitted()
    asked.asking.came(0)
    assert asked.choices == [0]


async def test_what_waits_is_asked_for_once_and_then_the_next_waits_again() -> None:
    asked = Asked(2 * TICK_S)
    asked.asking.emitted()
    for _ in range(3):
        asked.asking.came(0)
    assert asked.choices == []
    async with asyncio.timeout(PATIENCE_S):
        await asked.heard.wait()
    assert asked.choices == [0]
    asked.asking.emitted()
    asked.asking.came(0)
    assert asked.choices == [0]
    asked.heard.clear()
    async with asyncio.timeout(PATIENCE_S):
        await asked.heard.wait()
    assert asked.choices == [0, 0]


async def test_things_are_done_in_the_order_in_which_they_are_due_and_none_early() -> None:
    later, done, over = DeferredCalls(), list[tuple[int, float]](), asyncio.Event()
    clock = asyncio.get_running_loop().time
    began = clock()

    def note(ticks: int) -> None:
        done.append((ticks, clock() - began))
        if ticks == 6:
            over.set()

    for ticks in (6, 1, 4, 1):
        later.at(began + ticks * TICK_S, lambda ticks=ticks: note(ticks))  # type: ignore[misc]
    async with asyncio.timeout(PATIENCE_S):
        await over.wait()
    assert [ticks for ticks, _ in done] == [1, 1, 4, 6]
    assert all(at >= ticks * TICK_S - 0.002 for ticks, at in done), (
        "the loop counts in milliseconds"
    )


async def test_what_is_closed_does_nothing_any_more() -> None:
    later, done = DeferredCalls(), asyncio.Event()
    later.at(0.0, done.set)
    later.close()
    await asyncio.sleep(2 * TICK_S)
    assert not done.is_set()
