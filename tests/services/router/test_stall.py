"""StepLimit: when its timer is due, its clock decides."""

from __future__ import annotations

import asyncio

import pytest

from batonlm.rpc.calls import StepLimit


async def test_a_step_that_takes_too_long_ends_the_block() -> None:
    now = [0.0]
    with pytest.raises(TimeoutError):
        async with StepLimit(0.01, lambda: now[0]) as limit:
            now[0] += 0.005
            assert await limit.watch(asyncio.sleep(0, 7)) == 7
            asyncio.get_running_loop().call_later(0.05, lambda: now.__setitem__(0, 1.0))
            await limit.watch(asyncio.get_running_loop().create_future())


async def test_time_in_which_the_clock_stood_still_does_not_count() -> None:
    """Timers are due again and again, as after a gap; only the clock says that it was too long."""
    now, loop = [0.0], asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    async with StepLimit(0.01, lambda: now[0]) as limit:
        loop.call_later(0.2, answer.set_result, "late")
        assert await limit.watch(answer) == "late"


async def test_what_is_between_two_steps_does_not_count() -> None:
    now = [0.0]
    async with StepLimit(0.01, lambda: now[0]) as limit:
        await limit.watch(asyncio.sleep(0))
        now[0] += 60.0
        await asyncio.sleep(0.05)
        await limit.watch(asyncio.sleep(0))
