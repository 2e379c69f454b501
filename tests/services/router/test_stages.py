"""Where a request's time went and who served it, as its last event says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.observe.stages import StageTimes
from batonlm.router.config import RouterConfig
from batonlm.testing.scripted import ScriptedWorker
from tests.services.router.conftest import Answer, World
from tests.services.router.disturbed import (
    REQUEST,
    begin_and_pause,
    check,
    finish,
    moved,
)


def stages_of(answer: Answer) -> StageTimes:
    assert answer.finished is not None and answer.finished.stages is not None
    times = answer.finished.stages
    assert sum(times.spent().values()) == pytest.approx(times.total_s)
    assert min(times.spent().values()) >= 0.0
    assert 0.0 < times.first_token_s <= times.total_s
    return times


def served(times: StageTimes) -> set[str]:
    return {worker.instance_id for worker in times.workers}


def instance_ids(*workers: ScriptedWorker) -> set[str]:
    return {worker.identity.instance_id for worker in workers}


async def test_all_four_workers_are_named(world: World) -> None:
    await world.start()
    times = stages_of(await world.ask(REQUEST))
    assert [worker.role for worker in times.workers] == [
        "tokenizer", "prefill", "decode", "detokenizer",
    ]  # fmt: skip
    assert (times.attempts, times.moves) == (1, 0)
    assert times.kv_bytes > 0
    assert (times.prefill_cached_tokens, times.decode_cached_tokens) == (1, 2)
    assert times.tokenize_s > 0 and times.decode_s > 0


async def test_decode_that_prefills_says_so(world: World) -> None:
    await world.start(prefills=0)
    times = stages_of(await world.ask(REQUEST))
    assert served(times) == instance_ids(
        world.tokenizers[0], world.decodes[0], world.detokenizers[0]
    )
    assert (times.prefill_cached_tokens, times.hand_over_s) == (0, 0.0)


async def test_a_death_is_another_attempt_on_another_worker(world: World) -> None:
    await world.start(decodes=2)
    stream, answer, victim = await begin_and_pause(world, REQUEST, 5)
    await victim.kill()
    check(await finish(stream, answer))
    times = stages_of(answer)
    assert (times.attempts, times.moves) == (2, 0)
    assert served(times) >= instance_ids(*world.decodes)


async def test_a_move_is_an_attempt_too(world: World) -> None:
    times = stages_of(await moved(world))
    assert (times.attempts, times.moves) == (2, 1)
    assert times.hand_over_s > 0
    assert served(times) >= instance_ids(*world.decodes)


async def test_the_first_token_may_be_all(world: World) -> None:
    await world.start()
    times = stages_of(await world.ask(replace(REQUEST, max_tokens=1)))
    assert {worker.role for worker in times.workers} == {"tokenizer", "prefill", "detokenizer"}
    assert (times.decode_s, times.kv_bytes) == (0.0, 0)


async def test_an_operator_may_want_it_not_told(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, timings=False))
    answer = await world.ask(REQUEST)
    assert answer.finished is not None and answer.finished.stages is None
