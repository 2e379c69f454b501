"""What workers measure of themselves, and what is predicted from it, against made-up truths."""

from __future__ import annotations

import random

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.model import ModelDescription
from batonlm.core.routing.load import NEAR, NOMINAL, UNMEASURED, WorkerSpeed, reads
from batonlm.core.scheduler.plan import BlockSwap, Chunk, StepPlan, StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.core.scheduler.step_cost import PrefillCost, Regression
from batonlm.transfer.stats import LinkSpeed

SPEED = WorkerSpeed(0.010, 0.0003, 2e-7, 0.003, 0.0002, 5e-8, 512, 1e9, 0.004)


def chunk(first: int, count: int) -> Chunk:
    return Chunk(1, [0] * count, first, ((0, 1),))


def prefilling_s(*chunks: Chunk) -> float:
    positions = sum(len(c.token_ids) for c in chunks)
    read = sum(reads(c.first_position, c.end_position) for c in chunks)
    return 0.003 + 0.0002 * positions + 5e-8 * read


def test_a_regression_finds_what_is_there_and_follows() -> None:
    fit, draw = Regression(2), random.Random(1)
    for weights in ((0.5, 2.0), (3.0, 1.0)):
        for _ in range(1500):
            terms = (1.0, draw.uniform(0, 10))
            fit.observe(terms, weights[0] + weights[1] * terms[1])
        assert fit.weights == pytest.approx(weights, rel=0.02)
        assert fit.predict((1.0, 4.0)) == pytest.approx(weights[0] + 4 * weights[1], rel=0.02)


def test_what_would_cost_less_than_nothing_costs_nothing() -> None:
    fit = Regression(2)
    for value in range(20):
        fit.observe((1.0, value), 50.0 - value)
    assert min(fit.weights) >= 0.0


def test_a_prompts_time_is_learned_from_its_chunks() -> None:
    """Also of longer prompts than were seen: attention grows with the square, all else does not."""
    cost, draw = PrefillCost(), random.Random(2)
    assert cost.curve == (0.0, 0.0, 0.0)
    for _ in range(400):
        step = [
            chunk(draw.randrange(4000), draw.randint(1, 512)) for _ in range(draw.randint(1, 3))
        ]
        cost.observe(step, prefilling_s(*step))
    cost.observe([], 99.0)
    step_s, position_s, read_s = cost.curve
    learned = WorkerSpeed(
        prefill_step_s=step_s,
        prefill_position_s=position_s,
        prefill_read_s=read_s,
        prefill_step_tokens=512,
    )
    for first, end in ((0, 64), (0, 20_000), (15_000, 20_000)):
        steps = [chunk(at, min(512, end - at)) for at in range(first, end, 512)]
        expected = sum(prefilling_s(step) for step in steps)
        assert learned.prefill_s(first, end) == pytest.approx(expected, rel=0.05)


def test_a_slow_start_is_not_held_against_a_worker() -> None:
    cost = PrefillCost()
    for seconds in (5.0, 2.0):
        cost.observe([chunk(0, 20)], seconds)
        assert cost.curve == (0.0, 0.0, 0.0)
    for count in (10, 20, 40):
        cost.observe([chunk(0, count)], prefilling_s(chunk(0, count)))
    assert sum(cost.curve[:2]) == pytest.approx(0.0032, rel=0.05)


def test_positions_read_all_before_them_and_themselves_but_the_first() -> None:
    for first, end in ((0, 1), (0, NEAR), (NEAR - 1, NEAR + 2), (0, 2 * NEAR), (900, 1300)):
        each = [max(0, position + 1 - NEAR) for position in range(first, end)]
        assert reads(first, end) == sum(each)


def test_short_prompts_say_nothing_of_how_long_ones_grow() -> None:
    """However their times differ by chance."""
    cost, draw = PrefillCost(), random.Random(4)
    for _ in range(30):
        step = chunk(0, draw.randint(1, 60))
        cost.observe([step], prefilling_s(step) * draw.uniform(0.7, 3.0))
    assert cost.curve[2] == 0.0
    assert cost.curve[0] + 20_000 * cost.curve[1] < 3.0 * prefilling_s(chunk(0, 20_000))


def test_a_decode_worker_tells_its_steps_from_what_prefill_adds() -> None:
    model = ModelDescription("m", "", 512, 96, ())
    meter = Scheduler(BlockPool(8, 16), SchedulerPolicy(prefill_budget=256), model)
    draw = random.Random(3)

    def rows_s(rows: int, context: int) -> float:
        return 0.010 + 0.0003 * rows + 2e-7 * context

    for _ in range(600):
        rows = draw.randint(1, 64)
        context = rows * draw.randint(100, 2000)
        decoding = tuple(chunk(100, 1) for _ in range(rows))
        more = (chunk(draw.randrange(2000), draw.randint(1, 256)),) if draw.random() < 0.3 else ()
        prefill = sum(len(c.token_ids) for c in more)
        seconds = rows_s(rows, context) + (prefilling_s(*more) if more else 0.0)
        plan = StepPlan(1, decoding + more, work=StepWork(rows, context, prefill))
        meter.observe(plan, seconds)
    swapping = StepPlan(1, (chunk(0, 1),), swap_in=(BlockSwap((1,), (2,)),), work=StepWork(1, 1))
    meter.observe(swapping, 1000.0)
    speed = meter.speed
    assert speed.prefills and speed.decodes and speed.prefill_step_tokens == 256
    assert speed.decode_s(32, 40_000) == pytest.approx(rows_s(32, 40_000), rel=0.03)
    assert speed.prefill_s(0, 200) == pytest.approx(prefilling_s(chunk(0, 200)), rel=0.1)


def test_the_link_and_what_hand_overs_take_beside_it() -> None:
    link = LinkSpeed()
    assert (link.bytes_per_s, link.handover_s) == (0.0, 0.0)
    for size in (1_000_000, 4_000_000) * 20:
        link.read(size, size / 2e9)
        link.ended(size, 0.005 + size / 2e9)
    assert link.bytes_per_s == pytest.approx(2e9)
    assert link.handover_s == pytest.approx(0.005)
    link.ended(10**12, 0.001)
    assert 0.0 < link.handover_s < 0.005, "never less than nothing"
    speed = WorkerSpeed(link_bytes_per_s=2e9, handover_s=0.005)
    assert speed.handover_tail_s(4_000_000) == pytest.approx(0.007)
    assert UNMEASURED.handover_tail_s(10**9) == 0.0


def test_a_queue_is_taken_as_prompts_of_equal_length() -> None:
    prompts = 4 * SPEED.prefill_s(0, 512)
    assert SPEED.queue_s(4 * 512, 4) == pytest.approx(prompts)
    assert SPEED.queue_s(0, 0) == 0.0
    assert NOMINAL.queue_s(100, 0) == pytest.approx(0.01)


def test_what_is_missing_is_another_ones() -> None:
    assert SPEED.or_else(NOMINAL) is SPEED
    filled = UNMEASURED.or_else(SPEED)
    assert (filled.prefill_s(0, 100), filled.decode_s(2, 9)) == (
        SPEED.prefill_s(0, 100),
        SPEED.decode_s(2, 9),
    )
    prefill_only = WorkerSpeed(prefill_position_s=0.1)
    assert prefill_only.or_else(SPEED).prefill_position_s == 0.1
    assert prefill_only.or_else(SPEED).decode_s(1, 1) == SPEED.decode_s(1, 1)
    decode_only = WorkerSpeed(step_s=0.1, handover_s=0.2)
    filled = decode_only.or_else(SPEED)
    assert (filled.step_s, filled.handover_s) == (0.1, 0.2)
    assert filled.prefill_s(0, 10) == pytest.approx(0.003 + 0.002)


def test_a_step_that_prefills_too_little_is_refused() -> None:
    assert SchedulerPolicy(prefill_budget=64).prefill_beside(64) == 64
    with pytest.raises(ValueError, match="at least one block"):
        SchedulerPolicy(prefill_budget=63).prefill_beside(64)
