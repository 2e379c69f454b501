"""Blocks that a step in flight still swaps out are nobody else's before it is done."""

from __future__ import annotations

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.core.attempts import (
    BLOCK_SIZE,
    Outputs,
    attempt,
    decode_loop,
    expected,
    fill_in,
    handed_over,
)


def test_withheld_blocks_come_back_when_the_step_is_done() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    given_up = pool.allocate(5)
    assert given_up is not None
    blocks = tuple(given_up.blocks)
    pool.release(given_up)
    again = pool.allocate(2)
    assert again is not None and set(again.blocks) <= set(blocks)
    pool.launched(1)
    pool.withhold(blocks)
    pool.check()
    assert (pool.num_free, pool.num_returning) == (3, 3)
    pool.completed(1)
    pool.check()
    assert (pool.num_free, pool.num_returning) == (6, 0)


@pytest.mark.parametrize("delay_steps", [0, 3])
def test_what_is_handed_over_meanwhile_takes_other_blocks(delay_steps: int) -> None:
    """With a runner that is late, KV that arrives early would be swapped out as the victim's."""
    policy = SchedulerPolicy(headroom=1)
    loop = decode_loop(24, policy, num_swap_blocks=(60, 0), delay_steps=delay_steps)
    scheduler, outputs = loop.scheduler, Outputs()
    drawn = [attempt(f"r{i}", size=24, seed=i, max_tokens=30) for i in range(4)]
    for one in drawn:
        scheduler.add(one, 0.0)
    waiting = [attempt(f"h{i}", size=3, seed=9 + i, priority=-1) for i in range(3)]
    while (plan := loop.plan(0.0)) is not None:
        outputs.take(scheduler.take_events())
        loop.submit(plan)
        moving = {block for swap in plan.swap_out for block in swap.blocks}
        # More important than all that waits, and small: it gets the first free blocks.
        if moving and waiting and (needed := scheduler.reserve(waiting[-1], 0.0)) is not None:
            one = waiting.pop()
            arriving = scheduler.extents(one.key)
            assert moving.isdisjoint(b for first, n in arriving for b in range(first, first + n))
            first, kv = handed_over(one)
            fill_in(loop, one, needed, kv)
            scheduler.admit(one.key, first.tokens, 0.0)
        outputs.take(loop.apply(loop.collect()[1], 0.0))
        loop.idle_check()
    assert not scheduler.has_work
    assert scheduler.preemptions["swap_host"] > 0
    assert [outputs.of(one) for one in drawn] == [expected(one) for one in drawn]
