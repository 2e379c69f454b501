"""`baton.v1.Inference` over real gRPC: fields, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from grpc_status import rpc_status

from batonlm.core.errors import Reason
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.request import FinishReason
from batonlm.core.routing.aliases import Alias
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.request.pipeline import FleetStream
from batonlm.router.request.texts import MAX_DELTA_TOKENS
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.server import ProcessServer
from batonlm.testing import language
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, tokenizer_pb2, types_pb2
from tests.services.router.conftest import World, until

PROMPT = "in the beginning"
IDS = tuple(PROMPT.encode())


@dataclass
class Face:
    """A client of the router's gRPC server."""

    stub: inference_pb2_grpc.InferenceAsyncStub
    world: World

    async def generate(self, request: pb.GenerateRequest) -> list[pb.GenerationEvent]:
        return [answer.event async for answer in self.stub.Generate(request, timeout=120)]


@pytest.fixture
async def face(world: World) -> AsyncIterator[Face]:
    async with faced(world, stall_timeout_s=5) as made:
        yield made


@asynccontextmanager
async def faced(world: World, *, stall_timeout_s: float, **reader: int) -> AsyncIterator[Face]:
    """reader: channel arguments of the client."""
    pipeline = await world.start()
    servicer = InferenceServicer(pipeline, stall_timeout_s=stall_timeout_s)
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service()],
        public=True,
        interceptors=[KeyInterceptor(OpenAuthenticator())],
    )
    address = await server.start()
    arguments = [(f"grpc.http2.{name}", value) for name, value in reader.items()]
    async with grpc.aio.insecure_channel(address, options=arguments) as channel:
        yield Face(inference_pb2_grpc.InferenceStub(channel), world)
    await server.stop(0)


def options(**fields: object) -> pb.GenerationOptions:
    made = pb.GenerationOptions(
        sampling=types_pb2.SamplingParams(seed=5),
        stop=types_pb2.StopParams(max_tokens=20, ignore_eos=True),
    )
    made.MergeFrom(pb.GenerationOptions(**fields))  # type: ignore[arg-type]
    return made


async def test_generate(face: Face) -> None:
    events = await face.generate(
        pb.GenerateRequest(text=PROMPT, options=options(return_token_ids=True))
    )
    expected, _ = language.answer(IDS, 5, 0, 20, ignore_eos=True)
    accepted, *deltas, finished = events
    assert accepted.accepted.model == "made-up"
    assert accepted.accepted.seed == 5
    assert tuple(accepted.accepted.prompt_token_ids) == IDS
    assert tuple(t for event in deltas for t in event.delta.token_ids) == expected
    assert "".join(event.delta.text for event in deltas) == language.text_of(expected)
    assert deltas[-1].delta.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.finished.completion_tokens == 20
    assert finished.finished.prompt_tokens == len(IDS)


async def test_token_ids_in_and_none_out(face: Face) -> None:
    events = await face.generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), options=options())
    )
    expected, _ = language.answer(IDS, 5, 0, 20, ignore_eos=True)
    assert "".join(event.delta.text for event in events) == language.text_of(expected)
    assert not any(event.delta.token_ids for event in events)
    assert not events[0].accepted.prompt_token_ids


async def test_chat(face: Face) -> None:
    request = pb.ChatRequest(
        messages=[tokenizer_pb2.ChatMessage(role="user", content="hi")], options=options(n=2)
    )
    events = [answer.event async for answer in face.stub.Chat(request, timeout=120)]
    for choice in range(2):
        expected, _ = language.answer(tuple(b"user:hi\n"), 5, choice, 20, ignore_eos=True)
        text = "".join(e.delta.text for e in events if e.delta.choice == choice)
        assert text == language.text_of(expected)


async def test_absent_is_not_zero(face: Face) -> None:
    """Temperature 1 when absent, 0 when zero; as many tokens as fit, no top_logprobs."""
    await face.generate(pb.GenerateRequest(text=PROMPT, options=options()))
    await face.generate(
        pb.GenerateRequest(
            text=PROMPT,
            options=options(sampling=types_pb2.SamplingParams(temperature=0, top_logprobs=0)),
        )
    )
    absent, zero = (run.sampling for run in face.world.prefills[0].runs)
    assert (absent.temperature, absent.top_p, absent.top_logprobs) == (1.0, 1.0, None)
    assert (zero.temperature, zero.top_p, zero.top_logprobs) == (0.0, 1.0, 0)


async def test_models(face: Face) -> None:
    answer = await face.stub.ListModels(pb.ListModelsRequest())
    assert [(model.name, model.max_model_len) for model in answer.models] == [("made-up", 4096)]
    face.world.aliases |= {
        "chat": Alias((("absent", 1), ("made-up", 1))),
        "none": Alias((("absent", 1),)),
        "made-up": Alias((("made-up", 1), ("absent", 1))),
    }
    answer = await face.stub.ListModels(pb.ListModelsRequest())
    assert [model.name for model in answer.models] == ["chat", "made-up"]
    assert {model.digest for model in answer.models} == {language.MODEL.digest}


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (pb.GenerateRequest(), Reason.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateRequest(text=PROMPT, model="x"), Reason.MODEL_NOT_FOUND, "model"),
        (
            pb.GenerateRequest(text=PROMPT, options=options(n=99)),
            Reason.INVALID_ARGUMENT,
            "options.n",
        ),
        (
            pb.GenerateRequest(
                text=PROMPT, options=options(sampling=types_pb2.SamplingParams(temperature=9))
            ),
            Reason.INVALID_ARGUMENT,
            "options.sampling.temperature",
        ),
        (
            pb.GenerateRequest(
                text=PROMPT, options=options(stop=types_pb2.StopParams(max_tokens=9999))
            ),
            Reason.CONTEXT_LENGTH_EXCEEDED,
            "options.stop.max_tokens",
        ),
        (
            pb.GenerateRequest(
                text=PROMPT, options=options(stop=types_pb2.StopParams(stop_strings=[""]))
            ),
            Reason.INVALID_ARGUMENT,
            "options.stop.stop_strings",
        ),
    ],
)
async def test_refusals_name_the_field(
    face: Face, request_: pb.GenerateRequest, reason: Reason, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.generate(request_)
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == (reason, field)
    assert rpc_status.from_call(caught.value) is not None
    assert face.world.pipeline.num_requests == 0


async def test_a_call_that_is_cancelled_frees_everything(face: Face) -> None:
    request = pb.GenerateRequest(
        text=PROMPT, options=options(n=4, stop=types_pb2.StopParams(max_tokens=3000))
    )
    call = face.stub.Generate(request)
    answers = aiter(call)
    assert (await anext(answers)).event.HasField("accepted")
    await anext(answers)
    assert not face.world.nothing_left()
    call.cancel()
    await until(face.world.nothing_left)


async def test_a_call_that_is_cancelled_before_it_was_admitted(face: Face) -> None:
    await face.world.tokenizers[0].kill()
    await until(lambda: face.world.met()["tokenizer"] == 0)
    call = face.stub.Generate(pb.GenerateRequest(text=PROMPT, options=options()))
    await until(lambda: face.world.pipeline.num_requests == 1)
    call.cancel()
    await until(face.world.nothing_left)


async def test_the_calls_deadline_is_the_requests(face: Face) -> None:
    face.world.decodes[0].stepping.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in face.stub.Generate(
            pb.GenerateRequest(text=PROMPT, options=options()), timeout=0.3
        ):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(face.world.nothing_left)


async def test_an_end_token_is_reported_only_if_named(face: Face) -> None:
    seed = next(
        s
        for s in range(999)
        if language.answer(IDS, s, 0, 20)[1] is FinishReason.STOP
        and len(language.answer(IDS, s, 0, 20)[0]) > 2
    )
    for named in (False, True):
        stop = types_pb2.StopParams(max_tokens=20, stop_token_ids=[language.EOS] if named else [])
        sampling = types_pb2.SamplingParams(seed=seed)
        events = await face.generate(
            pb.GenerateRequest(
                text=PROMPT, options=pb.GenerationOptions(sampling=sampling, stop=stop)
            )
        )
        last = events[-2].delta
        assert last.finish_reason == types_pb2.FINISH_REASON_STOP
        assert last.HasField("stop_token_id") is named


async def test_a_call_that_is_not_read_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is larger than the client's window; what waits for it is no larger than before."""
    closed = asyncio.Event()
    close = FleetStream.aclose

    async def note(stream: FleetStream) -> None:
        await close(stream)
        closed.set()

    monkeypatch.setattr(FleetStream, "aclose", note)
    async with faced(world, stall_timeout_s=0.3, bdp_probe=0, lookahead_bytes=4096) as face:
        wanted = options(
            n=4,
            return_token_ids=True,
            sampling=types_pb2.SamplingParams(top_logprobs=2),
            stop=types_pb2.StopParams(max_tokens=1000),
        )
        answers = aiter(face.stub.Generate(pb.GenerateRequest(text=PROMPT, options=wanted)))
        await anext(answers)
        await asyncio.wait_for(closed.wait(), 120)
        await until(world.nothing_left)
        sizes: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for answer in answers:
                sizes.append(len(answer.event.delta.token_ids))
        assert failed.value.code() is grpc.StatusCode.CANCELLED
        assert max(sizes) <= MAX_DELTA_TOKENS
        assert sum(sizes) < 4000


async def test_the_last_event_says_where_the_time_went(face: Face) -> None:
    # With a seed of the router's choice some answers end with token 0: nothing moves then.
    *_, last = await face.generate(pb.GenerateRequest(text=PROMPT, options=options()))
    stages = last.finished.stages
    assert [worker.role for worker in stages.workers] == [
        "tokenizer", "prefill", "decode", "detokenizer",
    ]  # fmt: skip
    decode = face.world.decodes[0].identity
    assert stages.workers[2].instance_id == decode.instance_id[:8]
    assert stages.workers[2].address == decode.address
    assert stages.attempts == 1 and stages.kv_bytes > 0
    spent = [getattr(stages, f"{stage}_us") for stage in StageTimes().spent()]
    assert sum(spent) == pytest.approx(stages.total_us, abs=len(spent))
    assert 0 < stages.first_token_us <= stages.total_us
