"""What the trace of a request shows, whatever becomes of the request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.request import ChatPrompt, Message, Request, TextPrompt
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.config import RouterConfig
from batonlm.rpc.server import ProcessServer
from batonlm.rpc.tracing import metadata_of
from batonlm.testing import language
from batonlm.v1 import inference_pb2, inference_pb2_grpc
from tests.recorded import Recorded, is_below, seconds
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import (
    PROMPT,
    REQUEST,
    begin,
    begin_and_pause,
    check,
    finish,
    moved,
)
from tests.services.router.gateway import gateway_of, request

STAGES = ("tokenize", "turn", "prefill", "hand_over", "decode", "detokenize")
ROOT = f"text_completion {language.MODEL.name}"
THEIRS = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1")


@pytest.fixture
def recorded(world: World) -> Recorded:
    made = Recorded()
    world.tracer = made.tracer
    return made


def told(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def covered(recorded: Recorded, root: ReadableSpan) -> list[str]:
    """Its stages follow each other from its beginning to its end, and are told in order."""
    stages = recorded.named(*STAGES)
    assert all(is_below(stage, root) for stage in stages)
    edges = [root.start_time, *(stage.end_time for stage in stages)]
    assert [stage.start_time for stage in stages] == edges[:-1]
    assert edges[-1] == root.end_time
    assert sum(map(seconds, stages)) == pytest.approx(seconds(root))
    assert not recorded.open
    return [stage.name for stage in stages]


async def test_one_trace_of_one_request(world: World, recorded: Recorded) -> None:
    await world.start()
    # A hand-over that is over before the first token is heard of is no stage.
    world.decodes[0].collecting.clear()
    stream, answer = await begin(world, replace(REQUEST, model=language.MODEL.name), 1)
    world.decodes[0].collecting.set()
    await finish(stream, answer)
    root = recorded.one(ROOT)
    assert covered(recorded, root) == list(STAGES)
    assert root.parent is None
    assert told(root) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": language.MODEL.name,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 120,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": told(root)["gen_ai.response.id"],
        "gen_ai.response.model": language.MODEL.name,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": told(root)["gen_ai.response.time_to_first_chunk"],
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 120,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "baton.tenant": "",
        "baton.attempts": 1,
        "baton.moves": 0,
        "baton.transfer.bytes": told(root)["baton.transfer.bytes"],
    }
    (first,) = root.events
    assert first.name == "baton.first_token"
    assert root.start_time is not None and root.end_time is not None
    assert root.start_time < first.timestamp <= root.end_time
    attempt = recorded.one("attempt")
    assert is_below(attempt, root)
    assert told(attempt) == {
        "baton.attempt.number": 0,
        "baton.attempt.reason": told(attempt)["baton.attempt.reason"],
        "baton.attempt.position": 0,
        "baton.attempt.input_tokens": len(PROMPT),
        "baton.attempt.moved": False,
        "baton.prefill.instance_id": world.prefills[0].identity.instance_id,
        "baton.decode.instance_id": world.decodes[0].identity.instance_id,
    }
    assert len(recorded.spans) == len(STAGES) + 2
    assert not any(PROMPT in str(span.attributes) for span in recorded.spans)


async def test_every_worker_is_told_where_it_belongs(world: World, recorded: Recorded) -> None:
    await world.start()
    await world.ask(replace(REQUEST, trace=THEIRS))
    root, attempt = recorded.one(ROOT), recorded.one("attempt")
    assert root.parent is not None and f"{root.parent.span_id:016x}" == "b" * 16

    def header(span: ReadableSpan) -> str:
        return f"00-{'a' * 32}-{span.context.span_id:016x}-01"

    (asked,) = world.tokenizers[0].traces
    assert asked == TraceContext(header(recorded.one("tokenize")), "vendor=1")
    (run,) = world.prefills[0].runs
    (start,) = world.decodes[0].starts
    assert run.traceparent == start.traceparent == header(attempt)
    (opening,) = world.detokenizers[0].openings
    assert opening.traceparent == header(root)


async def test_nothing_is_said_where_nothing_is_traced(world: World) -> None:
    world.tracer = Recorded(share=0.0).tracer
    await world.start()
    await world.ask(REQUEST)
    assert world.tokenizers[0].traces == [TraceContext()]
    assert world.prefills[0].runs[0].traceparent == ""
    assert world.detokenizers[0].openings[0].traceparent == ""


async def test_a_death_is_two_attempts_of_one_trace(world: World, recorded: Recorded) -> None:
    await world.start(decodes=2)
    stream, answer, first = await begin_and_pause(world, REQUEST, 5)
    await first.kill()
    check(await finish(stream, answer))
    root = recorded.one(ROOT)
    assert {"prefill", "decode"} <= set(covered(recorded, root))
    lost, other = recorded.named("attempt")
    assert told(lost)["error.type"] == "unavailable" and not lost.status.is_ok
    assert told(lost)["baton.decode.instance_id"] == first.identity.instance_id
    assert "error.type" not in told(other)
    assert told(other)["baton.attempt.number"] == 1
    position = told(other)["baton.attempt.position"]
    assert isinstance(position, int) and position >= 5
    assert is_below(lost, root) and is_below(other, root)
    assert told(root)["baton.attempts"] == 2 and root.status.is_ok


async def test_a_move_is_an_attempt_that_says_so(world: World, recorded: Recorded) -> None:
    await moved(world)
    covered(recorded, recorded.one(ROOT))
    stayed, other = recorded.named("attempt")
    assert [told(each)["baton.attempt.moved"] for each in (stayed, other)] == [False, True]
    assert stayed.status.is_ok and other.status.is_ok
    assert told(recorded.one(ROOT))["baton.moves"] == 1


async def test_a_client_that_leaves_ends_every_span(world: World, recorded: Recorded) -> None:
    await world.start()
    world.decodes[0].stepping.clear()
    stream, _ = await begin(world, REQUEST, 1)
    await stream.aclose()
    await until(world.nothing_left)
    root = recorded.one(ROOT)
    covered(recorded, root)
    assert told(root)["error.type"] == told(recorded.one("attempt"))["error.type"] == "cancelled"
    assert root.status.is_ok


@pytest.mark.deep
async def test_a_request_that_fails_says_of_what_kind(world: World, recorded: Recorded) -> None:
    await world.start(
        RouterConfig(local_prefill_tokens=0, max_attempts=1, wait_timeout_s=1.0), prefills=0
    )
    stream, _, victim = await begin_and_pause(world, REQUEST)
    await victim.kill()
    with pytest.raises(Unavailable):
        async for _ in stream:
            pass
    await stream.aclose()
    root = recorded.one(ROOT)
    covered(recorded, root)
    assert told(root)["error.type"] == "unavailable" and not root.status.is_ok
    assert root.status.description is None


@pytest.mark.parametrize(
    "request_, kind",
    [
        (replace(REQUEST, n=0), "invalid_argument"),
        (replace(REQUEST, model="another"), "model_not_found"),
        (Request(TextPrompt("\u0100"), max_tokens=10_000_000), "context_length_exceeded"),
    ],
)
async def test_a_refused_request_has_a_trace(
    world: World, recorded: Recorded, request_: Request, kind: str
) -> None:
    await world.start()
    with pytest.raises(BatonError):
        await world.pipeline.open(request_)
    (root,) = [span for span in recorded.spans if span.parent is None]
    covered(recorded, root)
    assert told(root)["error.type"] == kind
    assert root.status.is_ok and not root.events


async def test_a_chat_is_named_so(world: World, recorded: Recorded) -> None:
    await world.start()
    await world.ask(replace(REQUEST, prompt=ChatPrompt((Message("user", "hello"),))))
    assert recorded.named(f"chat {language.MODEL.name}")


async def test_nothing_to_generate(world: World, recorded: Recorded) -> None:
    await world.start()
    await world.ask(replace(REQUEST, max_tokens=0, prompt_logprobs=1))
    root = recorded.one(ROOT)
    scored = recorded.one("score_prompt")
    assert is_below(scored, root) and is_below(recorded.one("attempt"), scored)
    assert "error.type" not in told(root) and not root.events


async def test_a_pipeline_that_closes_leaves_no_span_open(world: World, recorded: Recorded) -> None:
    await world.start()
    world.prefills[0].computing.clear()
    opening = asyncio.create_task(world.pipeline.open(replace(REQUEST, n=2)))
    await until(lambda: bool(world.prefills[0].runs))
    await world.pipeline.close()
    await asyncio.gather(opening, return_exceptions=True)
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().aclose()
    root = recorded.one(ROOT)
    covered(recorded, root)
    assert told(root)["error.type"] == "cancelled"


async def test_a_bad_field_of_the_callers_trace_begins_a_new_one(
    world: World, recorded: Recorded
) -> None:
    await world.start()
    await world.ask(replace(REQUEST, trace=TraceContext("00-" + "0" * 32 + "-x", "a" * 5000)))
    assert recorded.one(ROOT).parent is None


async def test_both_grpc_faces_go_on_with_the_callers_trace(
    world: World, recorded: Recorded
) -> None:
    await world.start()
    servicer = InferenceServicer(world.pipeline, stall_timeout_s=5)
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service()],
        public=True,
        interceptors=[KeyInterceptor(OpenAuthenticator())],
    )
    metadata = metadata_of(THEIRS)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = inference_pb2.GenerateRequest(text=PROMPT)
        async for _ in stub.Generate(asked, timeout=120, metadata=metadata):
            pass
    await server.stop(0)
    async with gateway_of(world, RouterConfig(vllm_engine=True)) as gateway:
        async for _ in gateway.stub.Generate(request(), timeout=120, metadata=metadata):
            pass
    roots = recorded.named(ROOT)
    assert [f"{root.parent.span_id:016x}" for root in roots if root.parent] == ["b" * 16] * 2
