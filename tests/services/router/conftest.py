"""A router over scripted workers, all on real sockets of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from batonlm.cli.ports import free_ports
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import Accepted, Delta, Finished, FinishReason, Request
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.rebalance import Rebalancer
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.observe.records import UsageSink
from batonlm.router.request.migration import Migrator
from batonlm.router.request.pipeline import EventStream, Pipeline
from batonlm.router.workers.discovery import Discovery
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.channels import Channels
from batonlm.rpc.tracing import OFF, Tracer
from batonlm.testing.scripted import (
    ScriptedDecode,
    ScriptedDetokenizer,
    ScriptedKv,
    ScriptedPrefill,
    ScriptedTokenizer,
    ScriptedWorker,
)
from tests.services.router.gateway import Gateway, gateway_of
from tests.services.router.listed import Listed

PATIENCE_S = 120.0
"""Nothing here takes so long; what does has hung."""


@dataclass
class Answer:
    """Everything a client got of one request."""

    accepted: Accepted
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    last: dict[int, Delta] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        assert delta.choice not in self.last, "a delta after the last one of its choice"
        self.deltas.append(delta)
        self.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
        self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
        if delta.finish_reason is not None:
            self.last[delta.choice] = delta

    def reason(self, choice: int = 0) -> FinishReason | None:
        return self.last[choice].finish_reason


async def read(stream: EventStream) -> Answer:
    """Reads a stream to its end and closes it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            accepted = await anext(stream)
            assert isinstance(accepted, Accepted)
            answer = Answer(accepted)
            async for event in stream:
                if isinstance(event, Delta):
                    answer.add(event)
                if isinstance(event, Finished):
                    answer.finished = event
            return answer
    finally:
        await stream.aclose()


_ports: list[int] = []


def _lasting_address() -> str:
    """Of a port that the system gives to nobody, so that a worker can come back on it."""
    if not _ports:
        _ports.extend(free_ports(32))
    return f"127.0.0.1:{_ports.pop()}"


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens on its own."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (it changes elsewhere)
            await asyncio.sleep(0.002)


@dataclass
class World:
    """The workers of one test, and the router's pipeline over them."""

    network: ScriptedKv = field(default_factory=ScriptedKv)
    tokenizers: list[ScriptedTokenizer] = field(default_factory=list)
    prefills: list[ScriptedPrefill] = field(default_factory=list)
    decodes: list[ScriptedDecode] = field(default_factory=list)
    detokenizers: list[ScriptedDetokenizer] = field(default_factory=list)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    listed: dict[str, Listed] = field(default_factory=dict)
    """Where the router is told that workers are; a test may change it."""
    config: RouterConfig = field(default_factory=RouterConfig)
    fleet: Fleet | None = None
    channels: Channels | None = None
    router: Pipeline | None = None
    moving: asyncio.Task[None] | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    tracer: Tracer = OFF
    usage: UsageSink | None = None
    aliases: dict[str, Alias] = field(default_factory=dict)
    """Besides those of the configuration."""

    @property
    def pipeline(self) -> Pipeline:
        assert self.router is not None
        return self.router

    def new_prefill(self) -> ScriptedPrefill:
        return ScriptedPrefill(self.network)

    def new_decode(self) -> ScriptedDecode:
        return ScriptedDecode(self.network)

    async def start(
        self,
        config: RouterConfig | None = None,
        *,
        tokenizers: int = 1,
        prefills: int = 1,
        decodes: int = 1,
        detokenizers: int = 1,
    ) -> Pipeline:
        """Starts so many workers of each role, and a router that knows them all."""
        self.add(tokenizers, prefills, decodes, detokenizers)
        return await self.run(config)

    def add(
        self, tokenizers: int = 1, prefills: int = 1, decodes: int = 1, detokenizers: int = 1
    ) -> None:
        """Makes so many workers of each role."""
        self.tokenizers += [ScriptedTokenizer() for _ in range(tokenizers)]
        self.prefills += [self.new_prefill() for _ in range(prefills)]
        self.decodes += [self.new_decode() for _ in range(decodes)]
        self.detokenizers += [ScriptedDetokenizer() for _ in range(detokenizers)]

    async def run(self, config: RouterConfig | None = None) -> Pipeline:
        """Starts the workers there are, and the router; returns when it has met all of them."""
        self.config = config or RouterConfig(local_prefill_tokens=0)
        await self.serve()
        self.channels = Channels()
        self.listed = {role: Listed(found) for role, found in self.addresses.items()}
        self.fleet = Fleet(
            Discovery(self.listed), self.channels, WorkerIdentity("router", "r" * 32, "")
        )
        metrics = RouterMetrics(self.registry)
        self.router = Pipeline(
            self.fleet,
            self.config,
            metrics,
            tracer=self.tracer,
            usage=self.usage,
            aliases=lambda: self.config.own_aliases | self.aliases,
        )
        self.fleet.start()
        now = asyncio.get_running_loop().time()
        rebalancer = Rebalancer(self.config.rebalancing, "r" * 32, now)
        dispatcher = self.router.gate.dispatcher
        migrator = Migrator(self.fleet, metrics, rebalancer, lambda: dispatcher.newcomer)
        self.moving = asyncio.create_task(migrator.run())
        everybody = {role: len(found) for role, found in self.addresses.items()}
        await until(lambda: self.met() == everybody)
        return self.router

    async def serve(self) -> None:
        """Starts the workers there are, without a router."""
        groups: dict[str, list[ScriptedWorker]] = {
            "tokenizer": [*self.tokenizers],
            "prefill": [*self.prefills],
            "decode": [*self.decodes],
            "detokenizer": [*self.detokenizers],
        }
        for role, workers in groups.items():
            self.addresses[role] = tuple(
                [await worker.start(_lasting_address()) for worker in workers]
            )

    def met(self) -> dict[str, int]:
        """Live workers by role, as the router sees them."""
        assert self.fleet is not None
        pools = (
            self.fleet.tokenizers,
            self.fleet.prefills,
            self.fleet.decodes,
            self.fleet.detokenizers,
        )
        return {pool.role: len(pool.snapshots()) for pool in pools}

    def counted(self, name: str, **labels: str) -> float:
        """The value of one of the router's metrics."""
        return self.registry.get_sample_value(name, labels) or 0.0

    async def ask(self, request: Request) -> Answer:
        return await read(await self.pipeline.open(request))

    def nothing_left(self) -> bool:
        """No worker holds anything of any request, and neither does the router."""
        return (
            self.pipeline.num_requests == 0
            and not any(self.pipeline.held.values())
            and not any(decode.holds() for decode in self.decodes)
            and not any(prefill.held or prefill.running for prefill in self.prefills)
            and not any(detokenizer.texts for detokenizer in self.detokenizers)
        )

    async def close(self) -> None:
        held: dict[str, int] = {}
        if self.router is not None:
            await self.router.close()
            held = {kind: number for kind, number in self.router.held.items() if number}
        if self.moving is not None:
            self.moving.cancel()
            await asyncio.gather(self.moving, return_exceptions=True)
        if self.fleet is not None:
            await self.fleet.close()
        if self.channels is not None:
            await self.channels.close()
        for worker in (*self.tokenizers, *self.prefills, *self.decodes, *self.detokenizers):
            await worker.kill()
        assert not held, f"the router still holds {held}"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Gateway]:
    await world.start()
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as made:
        yield made
