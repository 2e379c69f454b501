"""`vllm.grpc.engine.VllmEngine` over real gRPC, in front of a router with scripted workers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from baton.core.api_keys import KeyBook, Limits
from baton.core.errors import InvalidArgument, Reason
from baton.core.request import FinishReason
from baton.router.config import RouterConfig
from baton.router.grpc_door import KeyInterceptor
from baton.router.keys import Door, OpenDoor
from baton.router.vllm.optional import engine_service
from baton.router.vllm.running import Running
from baton.rpc.digest import tokenizer_digest
from baton.rpc.errors import from_rpc_error
from baton.rpc.options import PUBLIC_STREAMS, PublicLimits
from baton.rpc.server import ProcessServer
from tests.services.router import language
from tests.services.router.conftest import World, until
from tests.services.router.test_default_deny import IndexDoor

TEXT = "in the beginning"
IDS = tuple(TEXT.encode())
MODEL = Path(__file__).parents[3] / "services/baton/models/baton-tiny"
Outcome = tuple[grpc.StatusCode, str]


@dataclass
class Gateway:
    """A client of the engine."""

    stub: pb_grpc.VllmEngineStub
    world: World

    async def generate(self, **fields: object) -> list[pb.GenerateResponse]:
        call = self.stub.Generate(request(**fields), timeout=20)
        return [message async for message in call]


def request(**fields: object) -> pb.GenerateRequest:
    """Twenty tokens of a prompt, unless something else is asked."""
    made = pb.GenerateRequest(text=TEXT, sampling_params=sampling())
    made.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return made


def sampling(**fields: object) -> pb.SamplingParams:
    return pb.SamplingParams(**{"seed": 5, "max_tokens": 20, "ignore_eos": True, **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def gateway_of(
    world: World, config: RouterConfig, door: Door | None = None
) -> AsyncIterator[Gateway]:
    assert world.fleet is not None
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[engine_service(world.pipeline, world.fleet, config)],
        public=True,
        interceptors=[KeyInterceptor(door or OpenDoor())],
        limits=PublicLimits(streams=PUBLIC_STREAMS * 2),
    )
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        yield Gateway(pb_grpc.VllmEngineStub(channel), world)
    await server.stop(0)


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Gateway]:
    await world.start()
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ids", [True, False])
async def test_tokens(gateway: Gateway, stream: bool, ids: bool) -> None:
    prompt: dict[str, object] = {"tokenized": pb.TokenizedInput(input_ids=IDS)} if ids else {}
    messages = await gateway.generate(stream=stream, sampling_params=sampling(n=2), **prompt)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    ends = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
    for choice in range(2):
        expected, _ = language.answer(IDS, 5, choice, 20, ignore_eos=True)
        assert tuple(ends[choice].output_ids) == expected
        assert ends[choice].finish_reason == "length"
        assert (ends[choice].prompt_tokens, ends[choice].completion_tokens) == (len(IDS), 20)
        streamed = [token for c in chunks if c.index == choice for token in c.token_ids]
        assert tuple(streamed) == (expected if stream else ())
    await until(gateway.world.nothing_left)


async def test_log_probabilities_of_answer_and_prompt(gateway: Gateway) -> None:
    asked = sampling(logprobs=1, prompt_logprobs=1, max_tokens=4)
    (message,) = await gateway.generate(sampling_params=asked)
    end = message.complete
    assert list(end.output_logprobs.token_ids) == list(end.output_ids)
    assert list(end.output_logprobs.token_logprobs) == [language.logprob(t) for t in end.output_ids]
    assert [list(top.token_ids) for top in end.output_logprobs.top_logprobs] == [
        [token] for token in end.output_ids
    ]
    first, *rest = end.input_logprobs.token_logprobs
    assert not first.HasField("value")
    assert [one.value for one in rest] == [language.logprob(token) for token in IDS[1:]]
    assert tuple(end.input_logprobs.token_ids) == IDS


async def test_only_the_prompt_is_told_where_nothing_is_generated(gateway: Gateway) -> None:
    for stream in (True, False):
        asked = sampling(max_tokens=0, prompt_logprobs=0)
        (message,) = await gateway.generate(stream=stream, sampling_params=asked)
        assert message.complete.finish_reason == "length"
        assert tuple(message.complete.input_logprobs.token_ids) == IDS
        assert not message.complete.output_ids


async def test_what_stopped_an_answer(gateway: Gateway) -> None:
    whole, _ = language.answer(IDS, 5, 0, 20, ignore_eos=True)
    wanted = language.text_of(whole[4:6])
    kept, _ = language.stopped(whole, wanted) or ((), "")
    for stream in (True, False):
        *_, last = await gateway.generate(stream=stream, sampling_params=sampling(stop=[wanted]))
        assert last.complete.finish_reason == "stop"
        assert last.complete.matched_stop_str == wanted
        assert tuple(last.complete.output_ids) == kept
    stop = sampling(stop_token_ids=[whole[3]])
    *_, last = await gateway.generate(sampling_params=stop)
    assert last.complete.matched_token_id == whole[3]
    assert tuple(last.complete.output_ids) == whole[: whole.index(whole[3]) + 1]


async def test_an_end_of_the_models_own_is_no_match(gateway: Gateway) -> None:
    seed = next(s for s in range(999) if language.answer(IDS, s, 0, 20)[1] is FinishReason.STOP)
    asked = pb.SamplingParams(seed=seed, max_tokens=20)
    call = gateway.stub.Generate(pb.GenerateRequest(text=TEXT, sampling_params=asked), timeout=20)
    (message,) = [message async for message in call]
    assert message.complete.finish_reason == "stop"
    assert message.complete.WhichOneof("matched_stop") is None
    assert message.complete.output_ids[-1] == language.EOS


async def test_forms_go_to_the_tokenizer_as_from_every_door(gateway: Gateway) -> None:
    await gateway.generate(sampling_params=sampling(json_schema='{"type":"array"}'))
    assert gateway.world.tokenizers[0].grammars[0].text == '{"type":"array"}'


async def test_refusals_are_in_the_protocols_words(gateway: Gateway) -> None:
    bad = {
        "sampling_params.n": sampling(n=2**32 - 1),
        "sampling_params.max_tokens": sampling(max_tokens=9999),
        "sampling_params.stop_token_ids": sampling(stop_token_ids=[999]),
        "sampling_params.structural_tag": sampling(structural_tag="{}"),
    }
    for field, asked in bad.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.generate(sampling_params=asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field == field
    ids = pb.TokenizedInput(input_ids=[language.VOCAB])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.generate(tokenized=ids)
    assert from_rpc_error(caught.value).field == "tokenized.input_ids"
    assert gateway.world.pipeline.num_requests == 0


async def test_ids_and_seed_are_told_in_headers(gateway: Gateway) -> None:
    call = gateway.stub.Generate(request(), timeout=20)
    headers = dict(await call.initial_metadata())
    assert headers["x-baton-seed"] == "5"
    assert len(headers["x-baton-request-id"]) == 24
    call.cancel()
    await until(gateway.world.nothing_left)


async def test_an_abort_ends_what_runs(gateway: Gateway) -> None:
    """With the tokens so far; and it names a request of the protocol's, not one of Baton's."""
    asked = request(request_id="mine", stream=True, sampling_params=sampling(n=2, max_tokens=4000))
    messages: list[pb.GenerateResponse] = []
    call = gateway.stub.Generate(asked, timeout=20)
    other = asyncio.ensure_future(gateway.generate(request_id="other"))
    async for message in call:
        messages.append(message)
        if len(messages) == 6:
            await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine", "never"]), timeout=20)
    assert await call.code() is grpc.StatusCode.OK
    *_, end, other_end = messages
    assert {end.complete.index, other_end.complete.index} == {0, 1}
    for complete in (end.complete, other_end.complete):
        assert complete.finish_reason == "abort"
        streamed = [
            t for m in messages if m.chunk.index == complete.index for t in m.chunk.token_ids
        ]
        assert list(complete.output_ids) == streamed
    assert (await other)[-1].complete.finish_reason == "length"
    await until(gateway.world.nothing_left)


async def test_an_abort_ends_what_waits_for_a_worker(gateway: Gateway) -> None:
    await gateway.world.tokenizers[0].kill()
    await until(lambda: gateway.world.met()["tokenizer"] == 0)
    asked = asyncio.ensure_future(
        gateway.generate(request_id="mine", sampling_params=sampling(n=2))
    )
    await until(lambda: gateway.world.pipeline.num_requests == 1)
    await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine"]), timeout=20)
    messages = await asked
    assert [m.complete.finish_reason for m in messages] == ["abort", "abort"]
    await until(gateway.world.nothing_left)


async def test_a_call_that_is_cancelled_frees_everything(gateway: Gateway) -> None:
    asked = request(stream=True, sampling_params=sampling(n=4, max_tokens=3000))
    call = gateway.stub.Generate(asked, timeout=20)
    await anext(aiter(call))
    assert not gateway.world.nothing_left()
    call.cancel()
    await until(gateway.world.nothing_left)


async def test_a_worker_that_dies_is_not_noticed(world: World) -> None:
    await world.start(decodes=2)
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as gateway:
        call = gateway.stub.Generate(
            request(stream=True, sampling_params=sampling(max_tokens=200)), timeout=20
        )
        tokens: list[int] = []
        async for message in call:
            tokens.extend(message.chunk.token_ids)
            if len(tokens) == 20:
                holder = next(decode for decode in world.decodes if decode.holds())
                await holder.kill()
    assert tuple(tokens) == language.answer(IDS, 5, 0, 200, ignore_eos=True)[0]


async def test_a_gateways_one_connection_carries_many_requests(gateway: Gateway) -> None:
    """More than a connection's usual share, and an abort still gets through."""
    gateway.world.decodes[0].stepping.clear()
    count = PUBLIC_STREAMS + 20
    asked = [
        asyncio.ensure_future(gateway.generate(request_id="all", stream=True)) for _ in range(count)
    ]
    await until(lambda: gateway.world.pipeline.num_requests == count)
    await gateway.stub.Abort(pb.AbortRequest(request_ids=["all"]), timeout=20)
    for messages in await asyncio.gather(*asked):
        assert messages[-1].complete.finish_reason == "abort"
    await until(gateway.world.nothing_left)


async def test_what_it_says_of_itself(gateway: Gateway) -> None:
    gateway.world.decodes[0].max_sequences = 7
    model = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    assert (model.served_model_name, model.max_context_length) == ("made-up", language.LONGEST)
    assert (model.vocab_size, list(model.eos_token_ids)) == (language.VOCAB, [language.EOS])
    assert model.is_generation and not model.supports_vision
    assert not (model.model_path or model.tokenizer_path), "there is no tokenizer to be had here"
    server = await gateway.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
    assert (server.server_type, server.data_parallel_size) == ("baton", 1)
    assert server.constrained_decoding_start == "first_token"
    assert not (server.kv_connector or server.kv_role or server.mm_processor)
    health = await gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)
    assert health.healthy and health.message


async def test_health_is_readiness(gateway: Gateway) -> None:
    await gateway.world.decodes[0].kill()
    await until(lambda: gateway.world.met()["decode"] == 0)
    health = await gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)
    assert not health.healthy
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_loads(world: World) -> None:
    for free in (1000, 500):
        decode = world.new_decode()
        decode.max_sequences, decode.free_blocks, decode.waiting_tokens = 1, free, 30
        decode.stepping.clear()
        world.decodes.append(decode)
    await world.start(decodes=0)
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as gateway:
        asked = [asyncio.ensure_future(gateway.generate()) for _ in range(5)]
        await until(lambda: len(world.pipeline.gate.queue) == 3)
        loads = await gateway.stub.GetLoads(pb.GetLoadsRequest(dp_rank=0), timeout=20)
        assert loads.dp_rank_count == 1
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 3, 5)
        assert (load.num_used_tokens, load.max_total_num_tokens) == (500 * 16, 2000 * 16)
        assert load.token_usage == load.utilization == 0.25
        assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (2, 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=20)
        assert from_rpc_error(caught.value).field == "dp_rank"
        for decode in world.decodes:
            decode.stepping.set()
        await asyncio.gather(*asked)


async def test_a_gateway_is_the_tenant_of_its_key(world: World) -> None:
    """It pays for all its users: what they ask counts against its limits, and nobody else aborts
    it."""
    book, key = KeyBook().with_key("acme", Limits(max_requests=1), "")
    book, other = book.with_key("other", Limits(), "")
    await world.start()
    world.decodes[0].stepping.clear()

    def showing(shown: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {shown}"),)

    config = RouterConfig(vllm_engine=True)
    async with gateway_of(world, config, IndexDoor(book)) as gateway:
        asked = request(request_id="x", stream=True)
        call = gateway.stub.Generate(asked, metadata=showing(key), timeout=20)
        assert tuple((await call.read()).chunk.token_ids)
        (run,) = world.prefills[0].runs
        tenant = book.tenant("acme")
        assert (run.tenant, run.cache_salt) == ("acme", tenant.salted(b""))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.Generate(asked, metadata=showing(key), timeout=20).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).retry_after_s
        abort = pb.AbortRequest(request_ids=["x"])
        await gateway.stub.Abort(abort, metadata=showing(other), timeout=20)
        assert world.pipeline.num_requests == 1
        await gateway.stub.Abort(abort, metadata=showing(key), timeout=20)
        assert (await call.read()).complete.finish_reason == "abort"
        await until(world.nothing_left)


async def test_several_models_have_no_name_in_this_protocol(world: World) -> None:
    decode = world.new_decode()
    decode.model = replace(language.MODEL, name="second")
    world.decodes.append(decode)
    await world.start()
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as gateway:
        for call in (gateway.generate(), gateway.stub.GetModelInfo(pb.GetModelInfoRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "--model" in (caught.value.details() or "")


async def test_what_is_not_offered_says_so(gateway: Gateway) -> None:
    for call in (
        gateway.stub.Embed(pb.EmbedRequest()),
        gateway.stub.FlushCache(common_pb2.FlushCacheRequest()),
        gateway.stub.StartProfile(common_pb2.StartProfileRequest()),
        gateway.stub.StopProfile(common_pb2.StopProfileRequest()),
        gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert from_rpc_error(caught.value).reason is Reason.UNIMPLEMENTED
        assert len(caught.value.details() or "") > 20


async def test_the_tokenizer_that_is_served_is_given_away(world: World, tmp_path: Path) -> None:
    folder = shutil.copytree(
        MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    model = replace(language.MODEL, tokenizer_digest=tokenizer_digest(folder))
    world.decodes.append(world.new_decode())
    world.decodes[0].model = model
    await world.start(decodes=0)
    config = RouterConfig(vllm_engine=True, vllm_tokenizer=str(folder))
    async with gateway_of(world, config) as gateway:
        archives = []
        for _ in range(2):
            chunks = gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20)
            read = [chunk async for chunk in chunks]
            archives.append(b"".join(chunk.data for chunk in read))
            assert read[-1].sha256 == hashlib.sha256(archives[-1]).hexdigest()
            assert not any(chunk.sha256 for chunk in read[:-1])
        assert archives[0] == archives[1]
        with zipfile.ZipFile(io.BytesIO(archives[0])) as archive:
            assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= {
                *archive.namelist()
            }
            for name in archive.namelist():
                assert archive.read(name) == (folder / name).read_bytes()
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
        assert info.model_path == info.tokenizer_path == "made-up"
        assert (
            info.architectures == json.loads((folder / "config.json").read_text())["architectures"]
        )


async def test_another_tokenizer_than_the_one_served_is_not_given_away(world: World) -> None:
    await world.start()
    config = RouterConfig(vllm_engine=True, vllm_tokenizer=str(MODEL))
    async with gateway_of(world, config) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_options_that_cannot_be_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start()
    assert world.fleet is not None
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(vllm_tokenizer=str(MODEL))
    assert caught.value.field == "vllm_tokenizer"
    config = RouterConfig(vllm_engine=True, vllm_tokenizer=str(tmp_path))
    with pytest.raises(InvalidArgument) as caught:
        engine_service(world.pipeline, world.fleet, config)
    assert caught.value.field == "vllm_tokenizer"
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'baton\[vllm\]'") as caught:
        engine_service(world.pipeline, world.fleet, RouterConfig(vllm_engine=True))
    assert caught.value.field == "vllm_engine"


def test_a_router_without_it_loads_nothing_of_it() -> None:
    loads = "import sys, baton.router.__main__; sys.exit('smg_grpc_proto' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads], timeout=60).returncode == 0


def test_nobody_aborts_what_another_tenant_asked() -> None:
    running = Running()
    with (
        running.entered("a", "x") as mine,
        running.entered("a", "x") as twin,
        running.entered("b", "x") as other,
    ):
        running.abort("a", ["x"])
        assert (mine.aborted, twin.aborted, other.aborted) == (True, True, False)
    assert len(running) == 0


async def test_an_abort_that_comes_first_is_not_forgotten() -> None:
    with Running().entered("", "x") as handle:
        called: list[bool] = []
        handle.abort()
        handle.on_abort(lambda: called.append(True))
        assert called == [True]
