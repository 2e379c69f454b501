"""One schedule: a real router over simulated processes, disturbed, and everything checked after.

What must hold: every request ends; what its client read is a beginning of the right answer, and all
of it unless it left, ran out of time or met more losses than attempts; no error is a fault of ours;
and then nobody holds anything for anybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.errors import BatonError, Reason
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import Delta
from batonlm.core.routing.load import WorkerSnapshot, WorkerState
from batonlm.core.routing.rebalance import MoveReason, Newcomer, PlannedMove, Rebalancer, Streams
from batonlm.decode.service import TAKE_BACK_S
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.request.migration import Migrator
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.discovery import StaticDiscovery
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.tracing import OFF
from tests.sim import virtual_loop
from tests.sim.disturbances import Disturbances, Machine
from tests.sim.hosts import Host, start_tracking
from tests.sim.kv import OFFERED_S, KvNetwork
from tests.sim.network import Network, SimChannels
from tests.sim.requests import SHAPES, Asked, Got, asked
from tests.sim.traces import Traces

END_S = 120.0
SETTLE_S = 1.9
SURE_LOSSES = 2
"""So many losses cost no request its answer."""

HONEST = {
    Reason.UNAVAILABLE,
    Reason.OVERLOADED,
    Reason.HANDOVER_FAILED,
    Reason.QUARANTINED,
    # Of tokens that were lost on the way.
    Reason.INTERNAL,
}


@dataclass
class Report:
    """What came of a schedule. fingerprint: of all that was delivered, and when."""

    seed: int
    violations: list[str] = field(default_factory=list)
    fingerprint: str = ""
    answers: int = 0
    losses: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    """Of sequences, by outcome."""


class Restless(Rebalancer):
    """Moves sequences all the time, for no reason."""

    def is_due(self, now: float) -> bool:
        return True

    def plan(
        self,
        workers: Iterable[WorkerSnapshot],
        streams: Streams,
        now: float,
        newcomer: Newcomer | None = None,
    ) -> list[PlannedMove]:
        serving = [w.identity.instance_id for w in workers if w.load.state is WorkerState.SERVING]
        return [
            PlannedMove(stream, giver, receiver, MoveReason.LOAD)
            for giver in serving
            for stream in streams(giver)
            if (receiver := self._random.choice(serving)) != giver and self._random.random() < 0.5
        ]


def run(seed: int, traces: Traces | None = None, *, restless: bool = False) -> Report:
    """Runs one schedule to its end. traces: is given all spans. restless: sequences move all the
    time."""
    report = Report(seed)
    with _errors(report):
        try:
            virtual_loop.run(seed, _Schedule(seed, report, traces, restless).run())
        except virtual_loop.Stalled:
            report.violations.append("everybody waits for ever")
    return report


class _Schedule:
    def __init__(self, seed: int, report: Report, traces: Traces | None, restless: bool) -> None:
        self.traces = traces
        self.rebalancer = Restless if restless else Rebalancer
        self.draw = Random(seed)
        self.report = report
        lost = self.draw.choice((0, 0, 0, 1, 2))
        self.network = Network(self.draw, twice=self.draw.choice((0.0, 0.0, 0.1, 0.3)), lost=lost)
        self.kv = KvNetwork(self.network)
        self.machines = self._machines()
        self.disturbances = Disturbances(self.draw, self.machines, losses=lost)

    async def run(self) -> None:
        start_tracking(asyncio.get_running_loop())
        for machine in self.machines:
            machine.start()
        addresses: dict[str, tuple[str, ...]] = {}
        for machine in self.machines:
            addresses[machine.role] = (*addresses.get(machine.role, ()), machine.host.address)
        channels: Any = SimChannels(self.network)
        self.fleet = Fleet(
            StaticDiscovery(addresses), channels, WorkerIdentity("router", "r" * 32, "")
        )
        config = RouterConfig(
            local_prefill_tokens=self.draw.choice((0, 10)), request_timeout_s=END_S / 2
        )
        metrics = _metrics()
        moved_before = _moves(metrics)
        tracer = OFF if self.traces is None else self.traces.start("router", "router")
        self.pipeline = Pipeline(self.fleet, config, metrics, tracer=tracer)
        self.fleet.start()
        now = asyncio.get_running_loop().time()
        rebalancer = self.rebalancer(config.rebalancing, f"router {self.report.seed}", now)
        dispatcher = self.pipeline.gate.dispatcher
        migrator = Migrator(self.fleet, metrics, rebalancer, lambda: dispatcher.newcomer)
        moving = asyncio.create_task(migrator.run())
        try:
            await self._play()
        finally:
            await self.pipeline.close()
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            await self.fleet.close()
            for machine in self.machines:
                machine.host.kill()
            await asyncio.sleep(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self._violated(f"{len(left)} tasks run on: {sorted(map(str, left))[:3]}")
        self.report.violations += self.network.faults
        self.report.fingerprint = self.network.fingerprint
        self.report.losses = self.disturbances.losses
        self.report.moves = _moves(metrics) - moved_before

    async def _play(self) -> None:
        clients = [asyncio.create_task(self._client()) for _ in range(self.draw.randint(2, 5))]
        disturbing = asyncio.create_task(self.disturbances.some())
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*clients)
        except TimeoutError:
            self._violated("a request did not end")
        await disturbing
        for machine in self.machines:
            machine.restore()
        await asyncio.sleep(SETTLE_S)
        if any(m.cut_off and m.worker and any(m.worker.held().values()) for m in self.machines):
            # Whoever could not be told frees it in time.
            await asyncio.sleep(OFFERED_S + TAKE_BACK_S)
        self._check_nothing_left()

    async def _client(self) -> None:
        """Asks one request, reads it, and may leave."""
        draw = self.draw
        wanted = asked(draw.randrange(SHAPES))
        request, hurried = wanted.request, draw.random() < 0.1
        if hurried:
            request = replace(request, deadline_s=draw.uniform(0.02, 1.0))
        leaves_after = draw.randint(0, 6) if draw.random() < 0.2 else None
        got = Got()
        await asyncio.sleep(draw.uniform(0.0, 1.0))
        try:
            stream = await self.pipeline.open(request)
            try:
                events = 0
                async for event in stream:
                    if events == leaves_after:
                        break
                    events += 1
                    if isinstance(event, Delta):
                        self._add(got, event)
                else:
                    self._check_whole(wanted, got)
            finally:
                await stream.aclose()
        except BatonError as error:
            honest = error.reason in HONEST and self.disturbances.losses > SURE_LOSSES
            foreseen = isinstance(error, Refusal) and error.limit is Limit.DEADLINE
            late = hurried and (foreseen or error.reason is Reason.DEADLINE_EXCEEDED)
            if not (honest or late):
                self._violated(f"a request failed: {error.reason.name} {error.message}")
        self._check_beginning(wanted, got)

    def _add(self, got: Got, delta: Delta) -> None:
        if delta.choice in got.ended:
            self._violated("a delta after the last one")
        got.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
        got.texts[delta.choice] = got.texts.get(delta.choice, "") + delta.text
        if delta.finish_reason is not None:
            got.ended.add(delta.choice)

    def _check_whole(self, wanted: Asked, got: Got) -> None:
        self.report.answers += 1
        token_ids = {choice: tuple(ids) for choice, ids in got.token_ids.items()}
        if (token_ids, got.texts) != (wanted.token_ids, wanted.texts):
            self._violated(f"another answer: {token_ids} for {wanted.token_ids}")

    def _check_beginning(self, wanted: Asked, got: Got) -> None:
        for choice, ids in got.token_ids.items():
            if tuple(ids) != wanted.token_ids[choice][: len(ids)]:
                self._violated(f"tokens that are not the answer's: {ids}")
        for choice, text in got.texts.items():
            if not wanted.texts[choice].startswith(text):
                self._violated(f"text that is not the answer's: {text!r}")

    def _check_nothing_left(self) -> None:
        for machine in self.machines:
            assert machine.worker is not None
            held = {kind: n for kind, n in machine.worker.held().items() if n}
            if held:
                self._violated(f"{machine.host.address} still holds {held}")
            machine.worker.check()
            if self.traces is not None and (still := self.traces.at[machine.host.address].open):
                self._violated(f"{machine.host.address} has spans that are open: {still}")
        if self.kv.open_offers():
            self._violated("KV is still on offer")
        for pipeline, fleet in self._routers():
            self._check_router(pipeline, fleet)

    def _routers(self) -> list[tuple[Pipeline, Fleet]]:
        return [(self.pipeline, self.fleet)]

    def _check_router(self, pipeline: Pipeline, fleet: Fleet) -> None:
        if pipeline.num_requests:
            self._violated("the router still counts requests")
        held = {kind: n for kind, n in pipeline.held.items() if n}
        if held:
            self._violated(f"the router still holds {held}")
        for decode in fleet.decodes.workers():
            if decode.client.sinks():
                self._violated("the router still has sequences on a decode worker")
            if decode.client.outgoing():
                self._violated("the router still has something to tell a decode worker")
        for detokenizer in fleet.detokenizers.workers():
            if detokenizer.client.num_texts:
                self._violated("the router still has texts at a detokenizer")

    def _violated(self, what: str) -> None:
        self.report.violations.append(what)

    def _machines(self) -> list[Machine]:
        machines = []
        step_s = self.draw.choice((0.005, 0.02, 0.02, 0.12))
        for role, counts in {
            "tokenizer": (1, 2),
            "prefill": (0, 1, 2, 2),
            "decode": (1, 2, 2),
            "detokenizer": (1, 2),
        }.items():
            for index in range(self.draw.choice(counts)):
                host = Host(f"{role}-{index}")
                self.network.hosts[host.address] = host
                machines.append(Machine(role, host, self.kv, step_s, self.traces))
        return machines


def _moves(metrics: RouterMetrics) -> Counter[str]:
    """Sequences that were to move so far, by outcome."""
    found: Counter[str] = Counter()
    for family in metrics.moves.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["outcome"]] += round(sample.value)
    return found


@cache
def _metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry())


@contextmanager
def _errors(report: Report) -> Iterator[None]:
    """What is logged as an error is one. Workers look around more rarely, to save time."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = logging.Formatter().format(record)
            report.violations.append(f"logged: {said[-2000:]}")

    keep, root = Keep(logging.ERROR), logging.getLogger()
    level = root.level
    root.addHandler(keep)
    root.setLevel(logging.ERROR)
    try:
        with (
            mock.patch("batonlm.rpc.worker.COALESCE_S", 0.6),
            mock.patch("batonlm.decode.servicer.HEARTBEAT_S", 0.9),
            mock.patch("batonlm.detokenizer.servicer.HEARTBEAT_S", 0.9),
            suppress(asyncio.CancelledError),
        ):
            yield
    finally:
        root.removeHandler(keep)
        root.setLevel(level)
