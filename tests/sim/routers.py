"""One schedule of several routers that are killed and cut off, with clients that go on elsewhere.

A client has every part of its answer once, whoever tells it; and when all is over nobody holds
anything, for routers that are gone neither.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import Accepted, Delta, Event, Finished, Request
from batonlm.core.request.resumption import EventIds, StreamPosition
from batonlm.core.routing.rebalance import Rebalancer
from batonlm.decode.service import TAKE_BACK_S
from batonlm.router.config import RouterConfig
from batonlm.router.request.migration import Migrator
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.discovery import StaticDiscovery
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.lifecycle import new_instance_id
from tests.sim import virtual_loop
from tests.sim.hosts import Host, start_tracking
from tests.sim.kv import OFFERED_S
from tests.sim.network import DOWN, UP, SimChannels
from tests.sim.requests import SHAPES, Asked, Got, asked
from tests.sim.schedule import (
    END_S,
    HONEST,
    SETTLE_S,
    SURE_LOSSES,
    Report,
    _errors,
    _metrics,
    _Schedule,
)
from tests.sim.workers import ORPHAN_S, RESUME_S

PATIENCE_S = 2.5
"""A client that hears nothing for so long goes to another router."""


@dataclass
class Router:
    """A router process, and what it is now."""

    host: Host
    addresses: dict[str, tuple[str, ...]]
    config: RouterConfig
    channels: Any
    fleet: Fleet = field(init=False)
    pipeline: Pipeline = field(init=False)
    _moving: asyncio.Task[None] = field(init=False)

    def start(self) -> None:
        self.host.boot()
        self.host.run(self._start)

    def _start(self) -> None:
        identity = WorkerIdentity("router", new_instance_id(), self.host.address)
        self.fleet = Fleet(StaticDiscovery(self.addresses), self.channels, identity)
        self.pipeline = Pipeline(self.fleet, self.config, _metrics())
        self.fleet.start()
        now = asyncio.get_running_loop().time()
        rebalancer = Rebalancer(self.config.rebalancing, identity.instance_id, now)
        dispatcher = self.pipeline.gate.dispatcher
        migrator = Migrator(self.fleet, _metrics(), rebalancer, lambda: dispatcher.newcomer)
        self._moving = asyncio.ensure_future(migrator.run())

    def restore(self) -> None:
        self.host.release(reset=False)
        if not self.host.alive:
            self.start()


def _adoptions() -> Counter[str]:
    """Choices that were to be adopted so far, by outcome."""
    return Counter(
        {
            sample.labels["outcome"]: round(sample.value)
            for family in _metrics().adoptions.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
    )


class _RoutersSchedule(_Schedule):
    def __init__(self, seed: int, report: Report) -> None:
        super().__init__(seed, report, None, restless=False)
        addresses: dict[str, tuple[str, ...]] = {}
        for machine in self.machines:
            addresses[machine.role] = (*addresses.get(machine.role, ()), machine.host.address)
            # Slow enough that streams last until something happens.
            machine.step_s = self.draw.choice((0.02, 0.05, 0.12))
        channels = SimChannels(self.network)
        config = RouterConfig(request_timeout_s=END_S / 2)
        self.routers = [
            Router(Host(f"router-{index}"), addresses, config, channels) for index in range(2)
        ]
        self.serving: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        start_tracking(asyncio.get_running_loop())
        for machine in self.machines:
            machine.start()
        for router in self.routers:
            router.start()
        before = _adoptions()
        try:
            await self._play()
        finally:
            for host in [*(r.host for r in self.routers), *(m.host for m in self.machines)]:
                host.kill()
            await asyncio.sleep(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self._violated(f"{len(left)} tasks run on: {sorted(map(str, left))[:3]}")
        self.report.violations += self.network.faults
        self.report.fingerprint = self.network.fingerprint
        self.report.losses = self.disturbances.losses
        self.report.moves = _adoptions() - before

    async def _play(self) -> None:
        clients = [asyncio.create_task(self._client()) for _ in range(self.draw.randint(2, 5))]
        disturbing = [asyncio.create_task(self._disturb_routers())]
        if self.draw.random() < 0.5:
            disturbing.append(asyncio.create_task(self.disturbances.some()))
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*clients)
        except TimeoutError:
            self._violated("a request did not end")
        await asyncio.gather(*disturbing)
        for machine in self.machines:
            machine.restore()
        for router in self.routers:
            router.restore()
        if self.serving:
            # What no client reads any more.
            await asyncio.wait(self.serving, timeout=END_S)
        await asyncio.sleep(RESUME_S + ORPHAN_S + SETTLE_S)
        if any(m.cut_off and m.worker and any(m.worker.held().values()) for m in self.machines):
            await asyncio.sleep(OFFERED_S + TAKE_BACK_S)
        self._check_nothing_left()

    def _routers(self) -> list[tuple[Pipeline, Fleet]]:
        return [(router.pipeline, router.fleet) for router in self.routers]

    async def _disturb_routers(self) -> None:
        await asyncio.gather(*(self._disturb_one() for _ in range(self.draw.choice((1, 2, 3)))))

    async def _disturb_one(self) -> None:
        draw = self.draw
        router = draw.choice(self.routers)
        await asyncio.sleep(draw.uniform(0.3, 2.5))
        host = router.host
        if not host.alive or any(host.held):
            return
        self.disturbances.losses += 1
        if draw.random() < 0.6:
            host.kill()
            await asyncio.sleep(draw.uniform(0.1, 2.0))
        else:
            for machine in self.machines:
                machine.cut_off = True
            host.hold((UP, DOWN))
            if draw.random() < 0.7:
                host.reset()
            await asyncio.sleep(draw.choice((0.3, 1.0, 3.0, 5.0)))
            if host.alive:
                host.release(reset=draw.random() < 0.3)
        router.restore()

    async def _client(self) -> None:
        """Asks one request, and goes on at any router until it has all of the answer."""
        draw = self.draw
        wanted = asked(draw.randrange(SHAPES))
        request, got = replace(wanted.request, resumable=True), Got()
        await asyncio.sleep(draw.uniform(0.0, 1.0))
        while True:
            router = draw.choice(self.routers)
            if draw.random() < 0.2:
                # Two go on with the same stream, and this client hears one of them.
                self._ask(draw.choice(self.routers), request)
            request, over = await self._read(wanted, got, router, request)
            if over:
                break
            await asyncio.sleep(draw.choice((0.01, 0.1, 0.5)))
        self._check_beginning(wanted, got)

    def _ask(self, router: Router, request: Request) -> asyncio.Queue[Event | BatonError]:
        events: asyncio.Queue[Event | BatonError] = asyncio.Queue()
        if not router.host.alive:
            events.put_nowait(Unavailable("there is no router"))
            return events
        serving = router.host.spawn(_serve(router, request, events))
        self.serving.add(serving)
        serving.add_done_callback(self.serving.discard)
        return events

    async def _read(
        self, wanted: Asked, got: Got, router: Router, request: Request
    ) -> tuple[Request, bool]:
        """Returns the request that goes on after what was read, and whether all is over."""
        events, ids = self._ask(router, request), None
        name = request.tenant.name
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    event = await events.get()
            except TimeoutError:
                # Its router runs on, if it is there.
                return request, False
            match event:
                case BatonError():
                    if event.retryable:
                        return request, False
                    honest = event.reason in HONEST and self.disturbances.losses > SURE_LOSSES
                    if not honest:
                        self._violated(f"failed: {event.reason.name} {event.message}")
                    return request, True
                case Accepted(request_id=request_id):
                    position = request.resumes or StreamPosition(request.stream_id(request_id))
                    ids = EventIds(position, name, request.n)
                case Delta():
                    assert ids is not None
                    _, new = ids.split(event)
                    if new.text or new.token_ids or new.finish_reason is not None:
                        self._add(got, new)
                    request = replace(request, resumes=StreamPosition.parse(ids.reached(), name))
                case Finished():
                    self._check_whole(wanted, got)
                    return request, True


async def _serve(
    router: Router, request: Request, events: asyncio.Queue[Event | BatonError]
) -> None:
    """What a router does for a call."""
    try:
        stream = await router.pipeline.open(request)
        try:
            async for event in stream:
                events.put_nowait(event)
        finally:
            await stream.aclose()
    except BatonError as error:
        events.put_nowait(error)
    except asyncio.CancelledError:
        events.put_nowait(Unavailable("the router is gone"))
        raise


def run(seed: int) -> Report:
    """Runs one schedule to its end. `moves` of the report counts adoptions."""
    report = Report(seed)
    with (
        _errors(report),
        mock.patch("batonlm.rpc.worker.COALESCE_S", 0.2),
        mock.patch("batonlm.router.request.runner.TOKEN_AGAIN_S", 1.0),
    ):
        try:
            virtual_loop.run(seed, _RoutersSchedule(seed, report).run())
        except virtual_loop.Stalled:
            report.violations.append("everybody waits for ever")
    return report
