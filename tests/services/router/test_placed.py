"""What a router has placed counts on a worker as long as it is there to be done, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.request.request import Request, TextPrompt
from batonlm.core.routing.failures import Breaker
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed, WorkerState
from batonlm.router.config import RouterConfig
from batonlm.router.request.dispatcher import FleetLedger, Placement
from batonlm.router.workers.fleet import Pool, Worker
from tests.services.router.conftest import World, until

PROMPT = "one long prompt, of which every byte is a token"
TOKENS = len(PROMPT)
REQUEST = Request(TextPrompt(PROMPT), seed=7, max_tokens=40, ignore_eos=True, n=2)
SPEED = WorkerSpeed(0.01, 0.001, 0.0, 0.0, 0.0001, 0.0, 256, 1e9, 0.01)


def on(pool: Pool[Any]) -> tuple[int, int]:
    """Sequences and tokens that are placed on its only worker."""
    (worker,) = pool.workers()
    return worker.placed_sequences, worker.placed_tokens


async def test_a_prompt_counts_on_prefill_until_it_is_computed(world: World) -> None:
    await world.start()
    assert world.fleet is not None
    prefills, decodes = world.fleet.prefills, world.fleet.decodes
    world.prefills[0].computing.clear()
    world.decodes[0].stepping.clear()
    asked = asyncio.create_task(world.ask(REQUEST))
    await until(lambda: bool(world.prefills[0].runs))
    assert (on(prefills), on(decodes)) == ((2, TOKENS), (2, 0))
    world.prefills[0].computing.set()
    await until(lambda: on(prefills) == (0, 0))
    assert on(decodes) == (2, 0)
    world.decodes[0].stepping.set()
    await asked
    await until(lambda: on(decodes) == (0, 0))


async def test_a_prompt_counts_on_decode_until_it_is_computed_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start(RouterConfig(local_prefill_tokens=1000), prefills=0)
    assert world.fleet is not None
    pool, decode = world.fleet.decodes, world.decodes[0]
    decode.stepping.clear()
    seen: list[tuple[int, int]] = []
    start = decode.begin

    def started(message: Any, router: str) -> None:
        seen.append(on(pool))
        start(message, router)

    monkeypatch.setattr(decode, "begin", started)
    asked = asyncio.create_task(world.ask(REQUEST))
    await until(lambda: bool(seen))
    assert seen == [(2, TOKENS)]
    await until(lambda: on(pool) == (2, 0))
    decode.stepping.set()
    await asked
    await until(lambda: on(pool) == (0, 0))


async def test_an_attempt_that_fails_counts_nowhere(world: World) -> None:
    await world.start()
    assert world.fleet is not None
    world.prefills[0].computing.clear()
    stream = await world.pipeline.open(REQUEST)
    await until(lambda: bool(world.prefills[0].runs))
    await stream.aclose()
    prefills, decodes = world.fleet.prefills, world.fleet.decodes
    await until(lambda: (on(prefills), on(decodes)) == ((0, 0), (0, 0)))


@pytest.mark.parametrize(("local", "where"), [(0, "remote"), (1000, "local")])
async def test_predictions_are_held_against_what_came(world: World, local: int, where: str) -> None:
    world.decodes, world.prefills = [world.new_decode()], [world.new_prefill()]
    for worker in (*world.decodes, *world.prefills):
        worker.speed = SPEED
    await world.start(RouterConfig(local_prefill_tokens=local), prefills=0, decodes=0)
    await world.ask(REQUEST)
    await world.ask(replace(REQUEST, n=1))
    name = "baton_first_token_prediction_ratio"
    assert world.counted(f"{name}_count", prefill=where) == 2
    assert world.counted(f"{name}_sum", prefill=where) > 0


async def test_nothing_is_predicted_for_workers_that_measured_nothing(world: World) -> None:
    await world.start()
    await world.ask(REQUEST)
    assert world.counted("baton_first_token_prediction_ratio_count", prefill="remote") == 0


def test_a_report_makes_what_is_fresh_old_and_snapshots_are_kept() -> None:
    nothing: Any = None
    worker = Worker(
        WorkerDescription(WorkerIdentity("decode", "d", "")), nothing, nothing, Breaker()
    )
    assert worker.snapshot is None
    worker.report(WorkerLoad(WorkerState.SERVING, waiting_tokens=5, free_blocks=4))
    first = worker.snapshot
    assert first is not None and worker.snapshot is first
    placed = worker.place(1, 100, 3)
    second = worker.snapshot
    assert second is not None
    assert (second.num_sequences, second.waiting_tokens, second.free_positions) == (1, 105, 1)
    worker.report(WorkerLoad(WorkerState.SERVING, waiting_tokens=7, free_blocks=4))
    third = worker.snapshot
    assert third is not None
    assert (third.num_sequences, third.waiting_tokens, third.free_positions) == (1, 100, 4)
    placed.computed()
    assert (worker.placed_sequences, worker.placed_tokens) == (1, 0)
    placed.release()
    placed.release()
    last = worker.snapshot
    assert last is not None
    assert (last.num_sequences, last.waiting_tokens) == (0, 7)


def test_a_decode_worker_has_room_for_states_or_gets_nothing() -> None:
    nothing: Any = None
    layout = KvLayout("d", "float32", 1, 1, 8, 8, state_positions=20)
    identity = WorkerIdentity("decode", "d", "")
    described = WorkerDescription(identity, layout=layout, block_size=16)
    worker = Worker(described, nothing, nothing, Breaker())
    # Two blocks of each sequence are its state's.
    worker.report(WorkerLoad(WorkerState.SERVING, running_sequences=1, free_blocks=10))
    ledger = FleetLedger(nothing)
    assert ledger.has_kv(worker, described.positions_taken(126, 1))
    undo = ledger.take(Placement(None, worker, nothing), 10, 2)
    assert ledger.held["kv_positions"] == 10 + 2 * (1 + 32)
    assert not ledger.has_kv(worker, described.positions_taken(52, 1))
    assert ledger.has_kv(worker, described.positions_taken(51, 1))
    undo()
    assert ledger.held["kv_positions"] == 0
