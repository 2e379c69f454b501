"""What a disk that fails costs: what lay there is computed again, and nobody hears of it."""

from __future__ import annotations

import pytest

from batonlm.core.scheduler.events import AttemptFailed
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.core.attempts import (
    Outputs,
    attempt,
    decode_loop,
    expected,
    run_out,
)

DISK_BLOCKS = 60


def small_loop(lost: range, depth: int) -> EngineLoop:
    """Three of the attempts below do not fit at once; some places on disk cannot be read."""
    return decode_loop(
        24,
        SchedulerPolicy(headroom=1),
        num_swap_blocks=(0, DISK_BLOCKS),
        lost_swap_blocks=lost,
        depth=depth,
        delay_steps=0,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_whose_kv_is_lost_is_computed_again(depth: int) -> None:
    drawn = [attempt(f"r{i}", size=24, seed=i, max_tokens=30) for i in range(4)]
    recomputed = []
    # With the first place on disk, the first sequence that lay there is lost, others are not.
    for lost in (range(0), range(1), range(DISK_BLOCKS)):
        loop = small_loop(lost, depth)
        for one in drawn:
            loop.scheduler.add(one, 0.0)
        events = run_out(loop)
        outputs = Outputs().take(events)
        assert [outputs.of(one) for one in drawn] == [expected(one) for one in drawn]
        assert not [event for event in events if isinstance(event, AttemptFailed)]
        assert loop.scheduler.preemptions["swap_disk"] > 0
        recomputed.append(loop.scheduler.preemptions.get("recompute", 0))
        # Nobody finds blocks that never came back.
        for one in drawn:
            loop.scheduler.add(one, 0.0)
            assert Outputs().take(run_out(loop)).of(one) == expected(one)
    assert recomputed[0] < recomputed[1] < recomputed[2]
