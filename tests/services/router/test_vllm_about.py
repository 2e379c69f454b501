"""`vllm.grpc.engine.VllmEngine`: what it tells of itself, and what it does not offer."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from batonlm.core.errors import InvalidArgument, Reason
from batonlm.router.api.vllm import engine_service
from batonlm.router.config import RouterConfig
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.testing import language
from tests.services.router.conftest import World, until
from tests.services.router.gateway import Gateway, gateway_of, request
from tests.services.router.test_keys import Kept

MODEL = Path(__file__).parents[3] / "services/batonlm/models/baton-tiny"


async def test_what_it_says_of_itself(gateway: Gateway) -> None:
    gateway.world.decodes[0].max_sequences = 7
    model = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=120)
    assert (model.served_model_name, model.max_context_length) == ("made-up", language.LONGEST)
    assert (model.vocab_size, list(model.eos_token_ids)) == (language.VOCAB, [language.EOS])
    assert model.is_generation and not model.supports_vision
    assert not (model.model_path or model.tokenizer_path), "there is no tokenizer to be had here"
    server = await gateway.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=120)
    assert (server.server_type, server.data_parallel_size) == ("baton", 1)
    assert server.constrained_decoding_start == "first_token"
    assert not (server.kv_connector or server.kv_role or server.mm_processor)
    health = await gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=120)
    assert health.healthy and health.message


async def test_health_is_readiness(gateway: Gateway) -> None:
    await gateway.world.decodes[0].kill()
    await until(lambda: gateway.world.met()["decode"] == 0)
    health = await gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=120)
    assert not health.healthy
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=120)
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
        loads = await gateway.stub.GetLoads(pb.GetLoadsRequest(dp_rank=0), timeout=120)
        assert loads.dp_rank_count == 1
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 3, 5)
        assert (load.num_used_tokens, load.max_total_num_tokens) == (500 * 16, 2000 * 16)
        assert load.token_usage == load.utilization == 0.25
        assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (2, 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=120)
        assert from_rpc_error(caught.value).field == "dp_rank"
        for decode in world.decodes:
            decode.stepping.set()
        await asyncio.gather(*asked)


async def test_the_load_of_all_tenants_is_an_operators_to_see(world: World, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "keys.json")
    shown = {who: (("authorization", f"Bearer {key}"),) for who, key in (
        ("tenant", kept.new("one")), ("operator", kept.new("staff", operator=True))
    )}  # fmt: skip
    world.decodes.append(world.new_decode())
    world.decodes[0].stepping.clear()
    await world.start(decodes=0)
    config = RouterConfig(vllm_engine=True)
    async with gateway_of(world, config, kept.authenticator()) as gateway:
        call = gateway.stub.Generate(request(), metadata=shown["tenant"], timeout=120)
        await until(lambda: world.pipeline.num_requests == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.GetLoads(pb.GetLoadsRequest(), metadata=shown["tenant"], timeout=120)
        assert from_rpc_error(caught.value).reason is Reason.UNAUTHENTICATED
        loads = await gateway.stub.GetLoads(
            pb.GetLoadsRequest(), metadata=shown["operator"], timeout=120
        )
        assert loads.loads[0].num_total_reqs == 1
        for who, requests in (("tenant", 0), ("operator", 1)):
            server = await gateway.stub.GetServerInfo(
                pb.GetServerInfoRequest(), metadata=shown[who], timeout=120
            )
            assert server.active_requests == requests
        world.decodes[0].stepping.set()
        assert [message async for message in call]


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


async def test_the_tokenizer_that_is_served_is_migrated_out(world: World, tmp_path: Path) -> None:
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
            chunks = gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=120)
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
        info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=120)
        assert info.model_path == info.tokenizer_path == "made-up"
        assert (
            info.architectures == json.loads((folder / "config.json").read_text())["architectures"]
        )


@pytest.mark.parametrize("digest", ["ab" * 16, ""])
async def test_another_tokenizer_than_the_one_served_is_not_migrated_out(
    world: World, digest: str
) -> None:
    """An empty digest is that of workers that report none."""
    world.decodes.append(world.new_decode())
    world.decodes[0].model = replace(language.MODEL, tokenizer_digest=digest)
    await world.start(decodes=0)
    config = RouterConfig(vllm_engine=True, vllm_tokenizer=str(MODEL))
    async with gateway_of(world, config) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=120).read()
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
    with pytest.raises(InvalidArgument, match=r"pip install 'batonlm\[vllm\]'") as caught:
        engine_service(world.pipeline, world.fleet, RouterConfig(vllm_engine=True))
    assert caught.value.field == "vllm_engine"


def test_a_router_without_it_loads_nothing_of_it() -> None:
    loads = "import sys, batonlm.router.__main__; sys.exit('smg_grpc_proto' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads], timeout=120).returncode == 0
