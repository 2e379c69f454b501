"""AwakeClock: what passed while the process was stopped does not count, and is counted."""

from __future__ import annotations

import asyncio
import time

import pytest

from batonlm.rpc.loop import LONGEST_TURN_S, TICK_S, AwakeClock


def test_it_goes_as_time_does_while_the_loop_comes_round() -> None:
    now = [100.0]
    awake = AwakeClock(lambda: now[0])
    began = awake()
    for _ in range(40):
        now[0] += TICK_S
        awake.tick()
    now[0] += 0.1
    assert abs(awake() - began - 40 * TICK_S - 0.1) < 1e-9
    assert (awake.stalls, awake.stalled_s) == (0, 0.0)


def test_a_gap_counts_as_one_turn_whoever_looks_first() -> None:
    now = [0.0]
    awake = AwakeClock(lambda: now[0])
    awake.tick()
    now[0] += 3600.0
    before_the_tick = awake()
    awake.tick()
    assert before_the_tick == awake() == LONGEST_TURN_S
    assert (awake.stalls, awake.stalled_s) == (1, 3600.0 - LONGEST_TURN_S)


def test_it_never_stands_still_for_one_that_is_always_late() -> None:
    """Else a starved router would never find out that a worker is dead."""
    now = [0.0]
    awake = AwakeClock(lambda: now[0])
    for _ in range(4):
        now[0] += 10 * LONGEST_TURN_S
        awake.tick()
    assert awake() == 4 * LONGEST_TURN_S and awake.stalls == 4


@pytest.mark.deep
async def test_it_ticks_by_itself_and_sees_that_the_loop_was_held_up() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now = time.monotonic()
        return now

    awake = AwakeClock(clock)
    awake.start()
    # In this order: `now` is what the clock read for it.
    began = awake(), now
    time.sleep(3 * LONGEST_TURN_S)  # noqa: ASYNC251 (it is to be held up)
    held_up = awake() - began[0]
    async with asyncio.timeout(120):
        while not awake.stalls:  # noqa: ASYNC110 (it ticks by itself)
            await asyncio.sleep(TICK_S)
    awake.stop()
    assert held_up <= LONGEST_TURN_S
    awake.tick()
    on_it, passed = awake() - began[0], now - began[1]
    assert passed - awake.stalled_s == pytest.approx(on_it)
