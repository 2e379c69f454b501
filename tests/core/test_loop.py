"""EngineLoop: a step is plan, run, apply, and what planning told comes first."""

from __future__ import annotations

import pytest

from baton.core.block_pool import InvariantBroken
from baton.core.events import Computed, FirstTokens, Planned
from tests.core.attempts import attempt, decode_loop, prefill_loop


def test_a_step_without_work_is_no_step() -> None:
    loop = prefill_loop()
    assert loop.plan(0.0) is None
    assert loop.step(0.0) == []
    loop.idle_check()


def test_events_come_in_the_order_in_which_things_happened() -> None:
    loop = prefill_loop()
    loop.scheduler.add(attempt(), 0.0, keep=False)
    assert [type(event) for event in loop.step(1.0)] == [Planned, Computed, FirstTokens]


def test_the_idle_check_finds_a_leak() -> None:
    loop = decode_loop()
    loop.scheduler.add(attempt(), 0.0)
    loop.step(0.0)
    loop.idle_check()
    (sequence,) = loop.scheduler._roster.running.values()
    sequence.table = None
    loop.scheduler._roster.running.clear()
    with pytest.raises(InvariantBroken):
        loop.idle_check()
