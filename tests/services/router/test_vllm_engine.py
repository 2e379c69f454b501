"""`vllm.grpc.engine.VllmEngine`: what is generated, how it ends, and whose it is."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from batonlm.core.admission.api_keys import KeyBook, TenantLimits
from batonlm.core.request.request import FinishReason
from batonlm.router.api.vllm.engine import RunningCalls
from batonlm.router.config import RouterConfig
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.server import PUBLIC_STREAMS
from batonlm.testing import language
from tests.services.router.conftest import World, until
from tests.services.router.gateway import IDS, TEXT, Gateway, gateway_of, request, sampling
from tests.services.router.test_default_deny import IndexAuthenticator


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
    call = gateway.stub.Generate(pb.GenerateRequest(text=TEXT, sampling_params=asked), timeout=120)
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
    call = gateway.stub.Generate(request(), timeout=120)
    headers = dict(await call.initial_metadata())
    assert headers["x-baton-seed"] == "5"
    assert len(headers["x-baton-request-id"]) == 32
    call.cancel()
    await until(gateway.world.nothing_left)


async def test_an_abort_ends_what_runs(gateway: Gateway) -> None:
    """With the tokens so far; and it names a request of the protocol's, not one of Baton's."""
    asked = request(request_id="mine", stream=True, sampling_params=sampling(n=2, max_tokens=4000))
    messages: list[pb.GenerateResponse] = []
    call = gateway.stub.Generate(asked, timeout=120)
    other = asyncio.ensure_future(gateway.generate(request_id="other"))
    async for message in call:
        messages.append(message)
        if len(messages) == 6:
            await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine", "never"]), timeout=120)
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
    await gateway.stub.Abort(pb.AbortRequest(request_ids=["mine"]), timeout=120)
    messages = await asked
    assert [m.complete.finish_reason for m in messages] == ["abort", "abort"]
    await until(gateway.world.nothing_left)


async def test_a_call_that_is_cancelled_frees_everything(gateway: Gateway) -> None:
    asked = request(stream=True, sampling_params=sampling(n=4, max_tokens=3000))
    call = gateway.stub.Generate(asked, timeout=120)
    await anext(aiter(call))
    assert not gateway.world.nothing_left()
    call.cancel()
    await until(gateway.world.nothing_left)


async def test_a_worker_that_dies_is_not_noticed(world: World) -> None:
    await world.start(decodes=2)
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as gateway:
        call = gateway.stub.Generate(
            request(stream=True, sampling_params=sampling(max_tokens=200)), timeout=120
        )
        tokens: list[int] = []
        for decode in world.decodes:
            decode.last_position = 30
        async for message in call:
            tokens.extend(message.chunk.token_ids)
            if len(tokens) >= 20 and any(decode.last_position for decode in world.decodes):
                holder = next(decode for decode in world.decodes if decode.holds())
                await holder.kill()
                for decode in world.decodes:
                    decode.last_position = None
    assert tuple(tokens) == language.answer(IDS, 5, 0, 200, ignore_eos=True)[0]


async def test_a_gateways_one_connection_carries_many_requests(gateway: Gateway) -> None:
    """More than a connection's usual share, and an abort still gets through."""
    gateway.world.decodes[0].stepping.clear()
    count = PUBLIC_STREAMS + 20
    asked = [
        asyncio.ensure_future(gateway.generate(request_id="all", stream=True)) for _ in range(count)
    ]
    await until(lambda: gateway.world.pipeline.num_requests == count)
    await gateway.stub.Abort(pb.AbortRequest(request_ids=["all"]), timeout=120)
    for messages in await asyncio.gather(*asked):
        assert messages[-1].complete.finish_reason == "abort"
    await until(gateway.world.nothing_left)


async def test_a_gateway_is_the_tenant_of_its_key(world: World) -> None:
    """It pays for all its users: what they ask counts against its limits, and nobody else aborts
    it."""
    book, key = KeyBook().with_key("acme", TenantLimits(max_requests=1), "")
    book, other = book.with_key("other", TenantLimits(), "")
    await world.start()
    world.decodes[0].stepping.clear()

    def showing(shown: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {shown}"),)

    config = RouterConfig(vllm_engine=True)
    async with gateway_of(world, config, IndexAuthenticator(book)) as gateway:
        asked = request(request_id="x", stream=True)
        call = gateway.stub.Generate(asked, metadata=showing(key), timeout=120)
        assert tuple((await call.read()).chunk.token_ids)
        (run,) = world.prefills[0].runs
        tenant = book.tenant("acme")
        assert (run.tenant, run.cache_salt) == ("acme", tenant.salted(b""))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.Generate(asked, metadata=showing(key), timeout=120).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).retry_after_s
        abort = pb.AbortRequest(request_ids=["x"])
        await gateway.stub.Abort(abort, metadata=showing(other), timeout=120)
        assert world.pipeline.num_requests == 1
        await gateway.stub.Abort(abort, metadata=showing(key), timeout=120)
        assert (await call.read()).complete.finish_reason == "abort"
        await until(world.nothing_left)


def test_nobody_aborts_what_another_tenant_asked() -> None:
    running = RunningCalls()
    with (
        running.entered("a", "x") as mine,
        running.entered("a", "x") as twin,
        running.entered("b", "x") as other,
    ):
        running.abort("a", ["x"])
        assert (mine.aborted, twin.aborted, other.aborted) == (True, True, False)
    assert len(running) == 0


async def test_an_abort_that_comes_first_is_not_forgotten() -> None:
    with RunningCalls().entered("", "x") as handle:
        called: list[bool] = []
        handle.abort()
        handle.on_abort(lambda: called.append(True))
        assert called == [True]
