"""Schedulers do the same with prompts that are only named as with prompts of real tokens."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.simulator.prompts import TOKEN, NamedChain, Prompt, Text, attempt_of
from baton_loadtest.simulator.skipping import SkippingScheduler
from baton_loadtest.simulator.workers import made_up
from batonlm.core.errors import BatonError, ContextLengthExceeded, InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.prefix import PrefixChain
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler

STRETCH = 64
MODEL = ModelDescription("model", "model", 4096, 100_000, (), "tokenizer")


def _tokens(own: int, length: int, names: tuple[int, ...]) -> tuple[int, ...]:
    """What the names stand for."""
    own_draw = Random(f"own {own}")
    tokens: list[int] = []
    for name in names:
        draw = Random(name)
        tokens += [draw.randrange(1, 100_000) for _ in range(STRETCH)]
    tokens += [own_draw.randrange(1, 100_000) for _ in range(max(0, length - len(tokens)))]
    return tuple(tokens[:length])


def _real(number: int, tokens: tuple[int, ...], output: int) -> Attempt:
    stop = StopParams(max_tokens=output, ignore_eos=True)
    sampling = SamplingParams(temperature=0.0)
    return Attempt(str(number), 0, (0,), tokens, len(tokens), sampling, stop)


def _shape(plan: StepPlan | None) -> list[tuple[object, ...]] | None:
    if plan is None:
        return None
    return [
        (c.sequence_id, c.first_position, len(c.token_ids), c.extents, len(c.samples))
        for c in plan.chunks
    ]


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.sampled_from((16, 32, 64)), st.sampled_from((40, 200)))
def test_the_same_plans(seed: int, block_size: int, blocks: int) -> None:
    draw = Random(seed)
    policy = SchedulerPolicy(max_sequences=8, token_budget=264, prefill_budget=128)
    pools = [BlockPool(blocks, block_size) for _ in range(2)]
    real = Scheduler(pools[0], policy, MODEL)
    named = SkippingScheduler(pools[1], policy, MODEL)
    for number in range(12):
        length, output = draw.randint(1, 400), draw.randint(1, 90)
        names = tuple(draw.randrange(2) for _ in range(draw.randint(0, length // STRETCH)))
        prompt = Prompt(number, length, names, STRETCH)
        now = float(number)
        outcomes = [
            _added(real, _real(number, _tokens(number, length, names), output), now),
            _added(named, attempt_of(str(number), 0, prompt, output), now),
        ]
        assert outcomes[0] == outcomes[1]
        for _ in range(draw.randint(0, 30)):
            _step(real, named, now)
    while real.has_work:
        _step(real, named, 100.0)
    assert not named.has_work
    for scheduler in (real, named):
        scheduler.check()


def _added(scheduler: Scheduler, attempt: Attempt, now: float) -> str:
    try:
        scheduler.add(attempt, now)
    except BatonError as error:
        return error.message
    return ""


def _step(real: Scheduler, named: SkippingScheduler, now: float) -> None:
    plans = [scheduler.plan(now) for scheduler in (real, named)]
    assert _shape(plans[0]) == _shape(plans[1])
    for scheduler, plan in zip((real, named), plans, strict=True):
        if plan is not None:
            scheduler.apply(made_up(plan), now)
    assert real.load == named.load


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_links_carry_the_units_of_real_ones(block_size: int) -> None:
    prompt = Prompt(1, 300, (5, 6), STRETCH)
    named = NamedChain(prompt, block_size)
    real = PrefixChain(b"root", b"units", block_size)
    tokens = (*_tokens(1, 300, (5, 6)), *([TOKEN] * 200))
    for chain in (named, real):
        chain.extend(Text(prompt) if chain is named else tokens, 480 // block_size)
    for one, other in zip(named.links, real.links, strict=True):
        assert (one.depth, len(one.units)) == (other.depth, len(other.units))
    told = b"".join(unit for link in named.links for unit in link.units)
    assert told.startswith(prompt.hashes) and len(prompt.hashes) == 16 * (300 // 64)


def test_names_say_what_is_shared() -> None:
    one, other = Prompt(1, 256, (7, 8, 9, 1), STRETCH), Prompt(2, 300, (7, 8, 3, 1), STRETCH)
    same = [a == b for a, b in zip(one.links(16), other.links(16), strict=False)]
    assert same == [True] * 8 + [False] * 8
    unnamed = [Prompt(own, 128).links(16) for own in (3, 4)]
    assert not {link.digest for link in unnamed[0]} & {link.digest for link in unnamed[1]}
    assert one.links(16)[4] == Prompt(9, 128, (7, 8), STRETCH).links(16)[4]


def test_what_does_not_fit_is_refused() -> None:
    scheduler = SkippingScheduler(BlockPool(10, 16), SchedulerPolicy(), MODEL)
    with pytest.raises(ContextLengthExceeded):
        scheduler.add(attempt_of("1", 0, Prompt(1, 500), 4), 0.0)
    with pytest.raises(InvalidArgument, match="named"):
        scheduler.add(_real(1, (1, 2, 3), 4), 0.0)
    with pytest.raises(InvalidArgument) as error:
        Prompt(1, 4000, stretch=100)
    assert error.value.field == "stretch"
