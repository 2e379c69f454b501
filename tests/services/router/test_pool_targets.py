"""How many workers a router says that each pool should have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.request import Request, TextPrompt
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.scaling import ScalingPolicy
from batonlm.router.config import RouterConfig
from batonlm.router.observe.gauges import PoolTargets, pool_targets
from batonlm.router.observe.metrics import Arrived, RouterMetrics
from batonlm.router.workers.discovery import Replicas
from tests.services.router.conftest import World

MODEL = ModelDescription("m", "model", 4096, 100, (), "tokenizer")
SPEED = WorkerSpeed(step_s=0.01, row_s=0.001, prefill_position_s=0.001)


def worker(
    role: str,
    speed: WorkerSpeed = SPEED,
    free_blocks: int = 100,
    waiting_sequences: int = 0,
    waiting_tokens: int = 0,
    running_sequences: int = 0,
) -> WorkerSnapshot:
    told = WorkerLoad(
        WorkerState.SERVING,
        waiting_sequences,
        waiting_tokens,
        running_sequences,
        free_blocks,
        speed=speed,
    )
    return WorkerSnapshot(
        WorkerIdentity(role, role, ""),
        model=MODEL,
        load=told,
        block_size=16,
        num_blocks=100,
        max_sequences=64,
    )


class Fleet:
    """What a router sees, set by hand."""

    def __init__(self, idle_s: float = 0.0) -> None:
        self.held: dict[str, int] = {}
        self.asleep: Any = (("m",), idle_s, lambda: self.held) if idle_s else ()
        self.prefills = [worker("prefill")]
        self.decodes = [worker("decode")]
        self.waiting: list[int] = []
        self.arrived = Arrived()
        self.now = 0.0
        self.routers = 1
        self.targets = PoolTargets(
            ScalingPolicy(1.0, 0.05, busy=0.5, lead_s=0.0, hold_s=0.0),
            lambda: self.prefills,
            lambda: self.decodes,
            lambda: [("m", tokens) for tokens in self.waiting],
            self.arrived,
            lambda: self.routers,
            lambda: self.now,
            *self.asleep,
        )

    def read(self, after_s: float = 1.0) -> tuple[float | None, float | None]:
        self.now += after_s
        found = self.targets.read()
        return found.get(("m", "prefill")), found.get(("m", "decode"))

    def accept(self, requests: int, tokens: int, model: str = "m") -> None:
        """Requests that come and get workers."""
        self.arrived.requests[model] += requests
        self.arrived.placed[model] += requests
        self.arrived.prompt_tokens[model] += requests * tokens


def test_what_waits_and_comes_counts_in_seconds_of_a_worker() -> None:
    fleet = Fleet()
    assert fleet.read() == (0, 1)
    fleet.waiting = [1000, 1000]
    fleet.prefills = [worker("prefill", waiting_sequences=1, waiting_tokens=1000)]
    # As the mean of what was seen within 20 s.
    assert fleet.read() == (2, 1)
    assert fleet.read(30.0) == (3, 1)
    # The other router is taken to have as much.
    fleet.routers = 2
    assert fleet.read(30.0) == (5, 1)
    # A thousand tokens a second keep one busy, two at half of their time.
    fleet = Fleet()
    fleet.read()
    fleet.accept(1, 1000)
    assert fleet.read() == (2, 1)


def test_refused_requests_count_as_those_that_came_through() -> None:
    fleet = Fleet()
    fleet.read()
    fleet.accept(10, 100)
    fleet.arrived.refused = 20
    # 3000 tokens a second keep three busy, six at half of their time.
    assert fleet.read() == (6, 1)
    # With 30 refused beside 10 that came through, the 58 that fill decode would be 232, and half of
    # what a worker runs is 32.
    fleet = Fleet()
    fleet.decodes = [worker("decode", running_sequences=58)]
    fleet.read()
    fleet.accept(10, 1)
    fleet.arrived.refused = 30
    assert fleet.read() == (1, 8)


def test_what_waits_for_a_full_decode_pool_brings_decode_workers_only() -> None:
    fleet = Fleet()
    fleet.waiting = [1000] * 8
    assert fleet.read() == (8, 1)
    fleet = Fleet()
    fleet.waiting = [1000] * 8
    fleet.decodes = [worker("decode", running_sequences=64)]
    assert fleet.read() == (0, 3)


def test_each_model_has_targets_of_its_own() -> None:
    fleet = Fleet()
    other = replace(MODEL, name="other")
    fleet.prefills.append(replace(worker("prefill"), model=other))
    fleet.decodes.append(replace(worker("decode"), model=other))
    fleet.read()
    fleet.accept(1, 1000)
    fleet.accept(3, 1000, "other")
    fleet.arrived.refused = 4
    fleet.now += 1.0
    found = fleet.targets.read()
    assert found["m", "prefill"] == 4 and found["other", "prefill"] == 12
    assert found["m", "decode"] == found["other", "decode"] == 1
    # A model whose workers are gone is not spoken of any more.
    del fleet.prefills[1], fleet.decodes[1]
    assert set(fleet.targets.read()) == {("m", "prefill"), ("m", "decode")}


def test_decode_is_told_by_kv_and_by_steps() -> None:
    fleet = Fleet()
    fleet.decodes = [worker("decode", free_blocks=0), worker("decode", free_blocks=50)]
    assert fleet.read()[1] == 3
    fleet.decodes = [worker("decode", running_sequences=60), worker("decode", waiting_sequences=60)]
    assert fleet.read()[1] == 4


def test_nothing_is_said_of_what_is_not_known() -> None:
    fleet = Fleet()
    fleet.prefills, fleet.decodes = [worker("prefill", WorkerSpeed())], []
    assert fleet.read() == (None, None)
    # Decode knows how long prompts take, where no prefill worker runs.
    fleet.prefills, fleet.decodes = [], [worker("decode")]
    fleet.waiting = [10]
    assert fleet.read() == (1, 1)


async def test_a_router_tells_them(world: World) -> None:
    pipeline = await world.start(RouterConfig(target_first_token_ms=1000.0))
    assert world.fleet is not None
    targets = pool_targets(
        pipeline, world.fleet, world.config, RouterMetrics(CollectorRegistry()), Replicas(None)
    )
    await world.ask(Request(TextPrompt("abc"), seed=7, max_tokens=4, ignore_eos=True))
    assert {role: target for (_, role), target in targets.read().items()}["decode"] == 1


def test_an_idle_model_needs_no_worker_until_somebody_asks_for_it() -> None:
    fleet = Fleet(idle_s=100.0)
    # A router that starts cannot know for how long the workers it finds were idle.
    assert fleet.read() == (0, 1)
    assert fleet.read(99.0) == (0, 1)
    assert fleet.read(2.0) == (0, 0)
    fleet.prefills, fleet.decodes = [], []
    assert fleet.read() == (0, 0)
    fleet.held = {"m": 2}
    assert fleet.read() == (None, 1)
    fleet.held = {}
    # Whoever asked may have gone before the worker has started: it comes all the same.
    assert fleet.read(50.0) == (None, 1)
    fleet.decodes = [worker("decode", running_sequences=1)]
    assert fleet.read(60.0) == (0, 1)
    fleet.decodes = [worker("decode")]
    assert fleet.read(99.0) == (0, 1)
    fleet.accept(1, 10)
    assert fleet.read(50.0)[1] == 1
    assert fleet.read(101.0) == (0, 0)


def test_a_router_that_starts_without_workers_asks_for_none() -> None:
    fleet = Fleet(idle_s=100.0)
    fleet.prefills, fleet.decodes = [], []
    assert fleet.read() == (0, 0)
    assert fleet.read(1000.0) == (0, 0)
