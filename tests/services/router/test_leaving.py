"""A router that leaves: nothing it has taken is lost, and nobody is left without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.errors import Unavailable
from batonlm.router.__main__ import leave
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.server import ProcessServer, PublicLimits
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, types_pb2
from tests.services.router.conftest import World, until
from tests.services.router_http.scripted import ANYONE

CONFIG = RouterConfig(local_prefill_tokens=1000, drain_timeout_s=20)
REPLICA = replace(CONFIG, lame_duck_s=0.3, connection_max_age_s=0.5)
TOKENS = 40
ASKED = pb.GenerateRequest(
    text="once upon a time",
    options=pb.GenerationOptions(
        sampling=types_pb2.SamplingParams(seed=5),
        stop=types_pb2.StopParams(max_tokens=TOKENS, ignore_eos=True),
        return_token_ids=True,
    ),
)
BODY = {"prompt": "once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "seed": 5}


@dataclass
class Router:
    """One replica: both its faces, and its way out."""

    pipeline: Pipeline
    http: HttpServer
    server: ProcessServer
    lame_duck_s: float
    grpc: str

    async def leave(self) -> None:
        """As on SIGTERM, to the end."""
        self.server.leave()
        await leave(self.pipeline, self.http, self.server, self.lame_duck_s)
        self.pipeline.cut()
        await self.server.stop(1)
        await self.http.close(1)


@asynccontextmanager
async def router(world: World, config: RouterConfig = CONFIG) -> AsyncIterator[Router]:
    assert world.fleet is not None
    pipeline = Pipeline(world.fleet, config, RouterMetrics(CollectorRegistry()))
    servicer = InferenceServicer(pipeline, stall_timeout_s=5)
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service()],
        public=True,
        limits=PublicLimits(max_age_s=config.connection_max_age_s),
        interceptors=[KeyInterceptor(OpenAuthenticator())],
    )
    http = await serve_http(HttpApp(pipeline, CollectorRegistry(), ANYONE), "127.0.0.1:0")
    try:
        address = await server.start()
        yield Router(pipeline, http, server, config.lame_duck_s, address)
    finally:
        await pipeline.close()
        await server.stop(0)
        await http.close()
        assert not any(pipeline.held.values()), pipeline.held


def client_of(router: Router) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.http.address}", timeout=120, trust_env=False)


async def generate(stub: inference_pb2_grpc.InferenceAsyncStub) -> int:
    """Tokens of one answer."""
    return sum([len(a.event.delta.token_ids) async for a in stub.Generate(ASKED, timeout=120)])


@pytest.mark.deep
async def test_what_runs_ends_well_and_what_comes_is_sent_on(world: World) -> None:
    await world.start(CONFIG)
    world.decodes[0].stepping.clear()
    async with (
        # A request has to come in that time.
        router(world, replace(REPLICA, lame_duck_s=3.0)) as leaver,
        client_of(leaver) as client,
        grpc.aio.insecure_channel(leaver.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await client.get("/health")).status_code == 200
        running = asyncio.create_task(generate(stub))
        streaming = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: leaver.pipeline.num_requests == 2)
        going = asyncio.create_task(leaver.leave())
        await until(lambda: not leaver.pipeline.ready())
        late = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: leaver.pipeline.num_requests == 3)
        assert (await client.get("/health")).status_code == 503
        await until(lambda: leaver.pipeline.draining)
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert not going.done()
        world.decodes[0].stepping.set()
        assert await running == TOKENS
        for answer in (await streaming, await late):
            assert answer.json()["usage"]["completion_tokens"] == TOKENS
        assert (await late).headers["connection"] == "close"
        await asyncio.wait_for(going, 120)


@pytest.mark.deep
async def test_what_does_not_end_in_time_is_told_to_try_again(world: World) -> None:
    await world.start(CONFIG)
    world.decodes[0].stepping.clear()
    async with (
        router(world) as leaver,
        client_of(leaver) as client,
        grpc.aio.insecure_channel(leaver.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = asyncio.create_task(generate(stub))
        streaming = asyncio.create_task(
            client.post("/v1/completions", json={**BODY, "stream": True})
        )
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: len(world.decodes[0].starts) == 3)
        for tokenizer in world.tokenizers:
            await tokenizer.kill()
        await until(lambda: world.met()["tokenizer"] == 0)
        waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: leaver.pipeline.num_requests == 4)
        leaver.pipeline.cut()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await running
        error = from_rpc_error(failed.value)
        assert isinstance(error, Unavailable) and error.retry_after_s == 1.0
        *_, last, rest = (await streaming).text.split("\n\n")
        assert rest == "" and '"code":"unavailable"' in last
        for answer in (await whole, await waiting):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    await until(world.nothing_left)


@pytest.mark.deep
async def test_what_still_runs_at_the_end_is_told_to_try_again(world: World) -> None:
    """The process was told to stop at once: nothing is drained."""
    await world.start(CONFIG)
    async with (
        router(world) as leaver,
        client_of(leaver) as client,
        grpc.aio.insecure_channel(leaver.grpc) as channel,
    ):
        world.decodes[0].step_s = 0.05
        running = asyncio.create_task(generate(inference_pb2_grpc.InferenceStub(channel)))
        streaming = asyncio.create_task(
            client.post("/v1/completions", json={**BODY, "stream": True})
        )
        await until(lambda: len(world.decodes[0].starts) == 2)
        world.decodes[0].stepping.clear()
        unplaced = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: leaver.pipeline.num_requests == 3)
        await leaver.pipeline.close()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await running
        error = from_rpc_error(failed.value)
        assert isinstance(error, Unavailable) and error.retry_after_s == 1.0
        *_, last, rest = (await streaming).text.split("\n\n")
        assert rest == "" and '"code":"unavailable"' in last and '"retryable":true' in last
        assert (await unplaced).status_code == 503
    await until(world.nothing_left)


@pytest.mark.deep
async def test_a_rolling_restart_loses_no_call(world: World) -> None:
    """Two replicas, clients that never try again, and one replica leaves while calls come in.

    Every gRPC client sends a call on another connection when it never left it on the first, which
    a connection that grows old cannot help. What a server has had is not sent again.
    """
    await world.start(CONFIG)
    async with router(world, REPLICA) as first, router(world, REPLICA) as second:
        target = f"ipv4:{first.grpc},{second.grpc}"
        options = [("grpc.lb_policy_name", "round_robin")]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            over, answered = False, 0

            async def client() -> None:
                nonlocal answered
                while not over:
                    assert await generate(stub) == TOKENS
                    answered += 1

            def more(count: int) -> Callable[[], bool]:
                """Whether so many more calls were answered, or one failed."""
                wanted = answered + count
                return lambda: answered >= wanted or any(each.done() for each in clients)

            clients = [asyncio.create_task(client()) for _ in range(8)]
            await until(more(8))
            await asyncio.wait_for(first.leave(), 120)
            await until(more(8))
            over = True
            await asyncio.gather(*clients)
    await until(world.nothing_left)
