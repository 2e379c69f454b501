"""Quiet decode steps taken at once end as steps taken one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.simulator.prompts import TOKEN, Prompt, attempt_of
from baton_loadtest.simulator.requests import Request, gap_quantile, merged
from baton_loadtest.simulator.simulation import Outcome, Simulation
from baton_loadtest.simulator.skipping import SkippingScheduler
from baton_loadtest.simulator.workers import made_up
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.cache_events import Change
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.core.request.model import ModelDescription
from batonlm.core.scheduler.policy import SchedulerPolicy
from tests.loadtest.simulator.fleets import fleet, traffic

MODEL = ModelDescription("model", "model", 4096, 1, (), "tokenizer")
CLOSE = 1e-9
"""Relative: times are sums of step times in another order of adding."""


@pytest.mark.deep
@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 32),
    prefills=st.integers(0, 2),
    decodes=st.integers(1, 3),
    blocks=st.sampled_from((150, 260, 2000)),
    max_running=st.sampled_from((3, 32)),
    per_s=st.sampled_from((1.0, 6.0, 30.0)),
)
def test_skipping_changes_nothing(
    seed: int, prefills: int, decodes: int, blocks: int, max_running: int, per_s: float
) -> None:
    # Where blocks are short, so that sequences are preempted and reservations refused, too.
    found = []
    for skip in (False, True):
        facts = fleet(prefills, decodes, blocks=blocks, max_running=max_running, skip=skip)
        simulation = Simulation(facts)
        found.append(simulation.run(traffic(seed, 30, per_s)))
        simulation.check()
    _same(*found)


def test_it_skips() -> None:
    requests = traffic(1, 40, 6.0)
    stepped, skipped = (Simulation(fleet(skip=skip)).run(requests) for skip in (False, True))
    _same(stepped, skipped)
    assert skipped.events < stepped.events / 2


def test_preemption_is_the_same() -> None:
    # Let in with room to grow, and then all grow beyond what there is.
    requests = [Request(0.003 * n, 32, 300 + 10 * n) for n in range(12)]
    stepped, skipped = (
        Simulation(fleet(0, 1, blocks=80, skip=skip)).run(requests) for skip in (False, True)
    )
    assert skipped.preemptions
    _same(stepped, skipped)


def test_reservations_that_find_no_room_are_the_same() -> None:
    requests = traffic(2, 60, 30.0)
    stepped, skipped = (
        Simulation(fleet(2, 2, blocks=150, skip=skip)).run(requests) for skip in (False, True)
    )
    assert any(record.attempts > 1 for record in skipped.records)
    _same(stepped, skipped)


def _same(stepped: Outcome, skipped: Outcome) -> None:
    assert skipped.preemptions == stepped.preemptions
    for one, other in zip(stepped.records, skipped.records, strict=True):
        for name in ("prefill", "decode", "cached_tokens", "attempts", "tokens", "refused"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("placed", "first_token", "ended", "last"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=CLOSE), name
        assert sum(one.gaps.values()) == sum(other.gaps.values())
    gaps = [merged(r.gaps for r in outcome.records) for outcome in (stepped, skipped)]
    for share in (0.1, 0.5, 0.9):
        # One class off, where a time lies on a bound.
        assert gap_quantile(gaps[0], share) == pytest.approx(
            gap_quantile(gaps[1], share), rel=0.021
        )
    for one_use, other_use in zip(stepped.decodes, skipped.decodes, strict=True):
        assert one_use.busy_s == pytest.approx(other_use.busy_s, rel=CLOSE)
        assert (one_use.steps, one_use.rows) == (other_use.steps, other_use.rows)


@settings(max_examples=150)
@given(st.integers(0, 1 << 32), st.integers(0, 60))
def test_the_pool_is_as_after_single_steps(seed: int, most: int) -> None:
    draw = Random(seed)
    lengths = [(draw.randint(1, 100), draw.randint(2, 90)) for _ in range(draw.randint(1, 6))]
    told: tuple[list[Change], list[Change]] = ([], [])
    schedulers = [
        SkippingScheduler(BlockPool(120, 16, changes.append), SchedulerPolicy(headroom=0), MODEL)
        for changes in told
    ]
    for number, (length, output) in enumerate(lengths):
        for scheduler in schedulers:
            attempt = attempt_of(str(number), 0, Prompt(number, length), output)
            assert scheduler.reserve(attempt, 0.0) == 0
            scheduler.admit(attempt.key, [ChoiceTokens(attempt.keys()[0], 0, (TOKEN,))], 0.0)
    stepped, skipped = schedulers
    steps = min(most, skipped.quiet_steps())
    for _ in range(steps):
        plan = stepped.plan(0.0)
        assert plan is not None
        stepped.apply(made_up(plan), 0.0)
    begun = steps < skipped.quiet_steps()
    last = stepped.plan(0.0) if begun else None
    skipped.skip(skipped.rows, steps, begun=begun)
    assert skipped.load == stepped.load
    assert told[0] == told[1]
    assert [one.position for one in skipped.rows] == [one.position for one in stepped.rows]
    if last is not None:
        stepped.apply(made_up(last), 0.0)
        skipped.skip(skipped.rows, 1, begun=False)
    plans = [scheduler.plan(0.0) for scheduler in schedulers]
    extents = [
        None if plan is None else [(c.first_position, c.extents) for c in plan.chunks]
        for plan in plans
    ]
    assert extents[0] == extents[1]
    for scheduler in schedulers:
        scheduler.check()
