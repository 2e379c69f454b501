"""What one tenant can do to another through the router's doors: nothing that is refused or waits.

The attacks are those that were found: long prompts without an end, requests that fail, and texts
that are only encoded. The tokenizer stands still for what is long, so nothing depends on time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import ContextLengthExceeded, InvalidArgument, ModelNotFound
from batonlm.core.request.request import Grammar, GrammarKind, TextPrompt, TokenPrompt
from batonlm.router.api.access import Authenticator, OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.vllm import engine_service
from batonlm.router.config import RouterConfig
from batonlm.rpc.server import ProcessServer
from batonlm.testing import language
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, tokenizer_pb2, types_pb2
from tests.services.router import gateway
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import REQUEST, check
from tests.services.router.test_explain import http_of
from tests.services.router_http.test_bodies import Client

GREEDY, POLITE = Tenant("greedy"), Tenant("polite")
MIB = 1 << 20
SIZES = (MIB, 1 << 16, 1 << 10)


async def with_a_slow_tokenizer(world: World) -> None:
    """It does nothing of what has a kilobyte or more."""
    await world.start(RouterConfig(local_prefill_tokens=0))
    world.tokenizers[0].slow_bytes = 1 << 10
    world.tokenizers[0].working.clear()


async def flood(
    world: World, begin: Callable[[int], Coroutine[Any, Any, object]]
) -> tuple[list[asyncio.Task[object]], list[Refusal]]:
    """Requests of all sizes, each size until it is refused: what is still held, and the
    refusals."""
    held: list[asyncio.Task[object]] = []
    refusals: list[Refusal] = []
    for size in SIZES:
        while True:
            asked = asyncio.create_task(begin(size))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not asked.done():
                held.append(asked)
                continue
            error = asked.exception()
            assert isinstance(error, Refusal)
            refusals.append(error)
            break
    return held, refusals


async def let_go(held: list[asyncio.Task[object]]) -> None:
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


def long_prompts(world: World) -> Callable[[int], Coroutine[Any, Any, object]]:
    return lambda size: world.pipeline.open(
        replace(REQUEST, tenant=GREEDY, prompt=TextPrompt("x" * size))
    )


def texts(world: World) -> Callable[[int], Coroutine[Any, Any, object]]:
    return lambda size: world.pipeline.tokenize(
        replace(REQUEST, tenant=GREEDY, prompt=TextPrompt("x" * size))
    )


def ids(world: World) -> Callable[[int], Coroutine[Any, Any, object]]:
    return lambda size: world.pipeline.detokenize(
        replace(REQUEST, tenant=GREEDY, prompt=TokenPrompt((97,) * (size // 4)))
    )


@pytest.mark.parametrize("attack", [long_prompts, texts, ids])
async def test_a_flood_of_long_inputs_refuses_and_delays_nobody_else(
    world: World, attack: Callable[[World], Callable[[int], Coroutine[Any, Any, object]]]
) -> None:
    await with_a_slow_tokenizer(world)
    held, refusals = await flood(world, attack(world))
    assert {refusal.limit for refusal in refusals} <= {Limit.INPUT, Limit.REQUESTS}
    assert all(refusal.retry_after_s for refusal in refusals)
    assert len(held) >= 14, "one tenant alone gets most of what there is"
    few = replace(REQUEST, tenant=POLITE, max_tokens=2)
    answers = await asyncio.gather(*(world.ask(few) for _ in range(64)))
    assert all(len(answer.token_ids[0]) == 2 for answer in answers)
    assert await world.pipeline.detokenize(
        replace(REQUEST, tenant=POLITE, prompt=TokenPrompt((97, 98)))
    )
    assert world.tokenizers[0].most_at_once == 1, "the others wait in the router"
    await let_go(held)
    await until(world.nothing_left)


async def test_a_long_prompt_is_served_before_the_backlog_of_others(world: World) -> None:
    await with_a_slow_tokenizer(world)
    size = 1 << 16
    backlog = [asyncio.create_task(long_prompts(world)(size)) for _ in range(14)]
    await until(lambda: world.tokenizers[0].num_slow == 1)
    own = "p" * size
    polite = asyncio.create_task(
        world.pipeline.open(replace(REQUEST, tenant=POLITE, prompt=TextPrompt(own)))
    )
    await asyncio.sleep(0)
    world.tokenizers[0].working.set()
    with pytest.raises(ContextLengthExceeded):
        await polite
    place = world.tokenizers[0].begun.index(own.encode())
    assert place <= 2, "the one that had begun, and at most one more"
    await let_go(backlog)
    await until(world.nothing_left)


FAULTS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"prompt": TextPrompt("x" * language.LONGEST)}, ContextLengthExceeded),
    ({"prompt": TokenPrompt((language.VOCAB,))}, InvalidArgument),
    ({"grammar": Grammar(GrammarKind.REGEX, "(")}, InvalidArgument),
    ({"model": "other"}, ModelNotFound),
    ({"n": 0}, InvalidArgument),
]


@pytest.mark.deep
@pytest.mark.parametrize(("wrong", "error"), FAULTS)
async def test_requests_that_fail_by_their_own_fault_count(
    world: World, wrong: dict[str, Any], error: type[Exception]
) -> None:
    await world.start()
    if "grammar" in wrong:
        world.tokenizers[0].refusals = [InvalidArgument("is no grammar", field="grammar")]
    rated = Tenant("rated", requests_per_minute=6)
    with pytest.raises(error):
        await world.pipeline.open(replace(REQUEST, tenant=rated, **wrong))
    with pytest.raises(Refusal) as caught:
        world.pipeline.receive(rated, 1)
    assert caught.value.limit is Limit.REQUEST_RATE
    check(await world.ask(replace(REQUEST, tenant=POLITE)))


async def test_a_prompt_that_is_too_long_pays_for_its_encoding(world: World) -> None:
    await world.start()
    rated = Tenant("rated", tokens_per_minute=60)
    long = TextPrompt("x" * language.LONGEST)
    with pytest.raises(ContextLengthExceeded):
        await world.pipeline.open(replace(REQUEST, tenant=rated, prompt=long))
    with pytest.raises(Refusal) as caught:
        await world.pipeline.open(replace(REQUEST, tenant=rated, max_tokens=1))
    assert caught.value.limit is Limit.TOKEN_RATE
    assert (caught.value.retry_after_s or 0.0) >= 60.0


async def test_who_leaves_while_its_prompt_is_encoded_has_made_a_request(world: World) -> None:
    await with_a_slow_tokenizer(world)
    rated = Tenant("rated", requests_per_minute=6)
    long = replace(REQUEST, tenant=rated, prompt=TextPrompt("x" * 2000))
    asked = asyncio.create_task(world.pipeline.open(long))
    await until(lambda: world.tokenizers[0].num_slow == 1)
    await let_go([asked])
    with pytest.raises(Refusal) as caught:
        await world.pipeline.open(long)
    assert caught.value.limit is Limit.REQUEST_RATE


async def test_what_baton_fails_to_do_costs_nothing(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=0.1))
    rated = Tenant("rated", requests_per_minute=6)
    await world.tokenizers[0].kill()
    await until(lambda: world.met()["tokenizer"] == 0)
    for _ in range(3):
        with pytest.raises(Exception, match="No tokenizer worker is ready"):
            await world.pipeline.open(replace(REQUEST, tenant=rated))


class Named:
    """Everybody is whom they say they are: rated ones may make one request."""

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        name = "".join(authorization)
        return Tenant(name, requests_per_minute=6 if name == "rated" else None)

    async def run(self) -> None:
        return


Stub = tuple[Callable[..., Any], Any, Any]


@asynccontextmanager
async def grpc_routes(world: World, authenticator: Authenticator) -> AsyncIterator[dict[str, Stub]]:
    """Every RPC that takes a prompt, with a request that is wrong and one that is not."""
    engine = engine_service(world.pipeline, world.fleet, world.config)  # type: ignore[arg-type]
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[InferenceServicer(world.pipeline, stall_timeout_s=5).service(), engine],
        public=True,
        interceptors=[KeyInterceptor(authenticator)],
    )
    address = await server.start()
    one = pb.GenerationOptions(stop=types_pb2.StopParams(max_tokens=1))
    hi = [tokenizer_pb2.ChatMessage(role="user", content="hi")]
    wrong = pb.GenerationOptions(n=99)
    async with grpc.aio.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        yield {
            "Generate": (
                inference.Generate,
                pb.GenerateRequest(text="hi", options=wrong),
                pb.GenerateRequest(text="hi", options=one),
            ),
            "Chat": (
                inference.Chat,
                pb.ChatRequest(messages=hi, options=wrong),
                pb.ChatRequest(messages=hi, options=one),
            ),
            "VllmEngine.Generate": (
                vllm.Generate, gateway.request(data_parallel_rank=5), gateway.request()
            ),
        }  # fmt: skip
    await server.stop(0)


@pytest.mark.parametrize("name", ["Generate", "Chat", "VllmEngine.Generate"])
async def test_every_grpc_route_counts_requests(world: World, name: str) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, vllm_engine=True))

    async def status(method: Callable[..., Any], message: Any, who: str) -> grpc.StatusCode:
        try:
            async for _ in method(message, metadata=[("authorization", who)], timeout=120):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with grpc_routes(world, Named()) as routes:
        method, wrong, right = routes[name]
        assert await status(method, wrong, "rated") is grpc.StatusCode.INVALID_ARGUMENT
        assert await status(method, right, "rated") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status(method, right, "polite") is grpc.StatusCode.OK
    await until(world.nothing_left)


async def test_callers_of_grpc_without_names_share_by_their_addresses(world: World) -> None:
    await with_a_slow_tokenizer(world)
    long = pb.GenerateRequest(text="x" * (1 << 16))
    inputs = world.pipeline.gate.admission.input_bytes
    async with grpc_routes(world, OpenAuthenticator()) as routes:
        call = routes["Generate"][0](long, timeout=120)
        await until(lambda: world.tokenizers[0].num_slow == 1)
        assert inputs.held("127.0.0.1") == inputs.total >= 1 << 16
        call.cancel()
        await until(world.nothing_left)


@pytest.mark.deep
@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_a_failed_request_leaves_nothing_for_the_garbage_collector(
    world: World, way: str
) -> None:
    """That one comes late, and what a failed request held is far more than it looks like."""
    await world.start(RouterConfig(local_prefill_tokens=0, vllm_engine=True))
    app = HttpApp(world.pipeline, CollectorRegistry(), HttpAccess(OpenAuthenticator()))
    text = "x" * (1 << 16)

    async def fail() -> None:
        world.tokenizers[0].begun.clear()
        if way == "http":
            asked = Client(who="", parts=[json.dumps({"prompt": text}).encode()])
            assert await asked.ask(app) == 400
            return
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in routes["Generate"][0](pb.GenerateRequest(text=text), timeout=120):
                pass

    async with grpc_routes(world, OpenAuthenticator()) as routes:
        await fail()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            await fail()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(5):
                await fail()
            # The last one's end may still be on its way through the server.
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < 5 * len(text) / 2)
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_one_invalid_prompt_among_several_is_named_and_leaves_nothing(world: World) -> None:
    await world.start()
    async with http_of(world) as http:
        for prompts, field in ((["a", "b", ""], "prompt"), (["a", "b"], "n")):
            body = {"prompt": prompts, "max_tokens": 4, "n": 1 if field == "prompt" else 0}
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
            await until(world.nothing_left)
