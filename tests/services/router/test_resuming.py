"""A request that is run again to continue its stream: seed, ids, and what of it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from batonlm.core.request.request import Request, TextPrompt
from batonlm.core.request.resumption import StreamPosition, keyed_stream_id
from batonlm.rpc.errors import from_rpc_error
from batonlm.v1 import inference_pb2 as pb
from tests.services.router.conftest import World, until
from tests.services.router.test_servicer import PROMPT, Face, faced, options

REQUEST = Request(TextPrompt(PROMPT), max_tokens=20, ignore_eos=True, n=2)


@pytest.fixture
async def face(world: World) -> AsyncIterator[Face]:
    async with faced(world, stall_timeout_s=5) as made:
        yield made


async def test_a_second_run_has_the_seed_and_an_id_of_its_own(world: World) -> None:
    """The first one may still run, and workers know requests by their ids."""
    await world.start()
    first = await world.ask(REQUEST)
    begun = first.accepted
    assert len(begun.request_id) == 32
    again = replace(REQUEST, resumable=True, resumes=StreamPosition(begun.request_id))
    second, other = await world.ask(again), await world.ask(REQUEST)
    assert second.accepted.seed == begun.seed and second.token_ids == first.token_ids
    assert second.accepted.request_id != begun.request_id
    assert other.accepted.seed != begun.seed and other.token_ids != first.token_ids
    assert {start.request_id for start in world.decodes[0].starts} == {
        answer.accepted.request_id for answer in (first, second, other)
    }


def shown(events: list[pb.GenerationEvent]) -> list[tuple[str, tuple[int, ...], int]]:
    """Text, tokens and end of each choice."""
    deltas = [event.delta for event in events if event.HasField("delta")]
    return [
        (
            "".join(delta.text for delta in deltas if delta.choice == choice),
            tuple(i for delta in deltas if delta.choice == choice for i in delta.token_ids),
            sum(delta.finish_reason for delta in deltas if delta.choice == choice),
        )
        for choice in range(2)
    ]


async def test_a_stream_goes_on_after_any_event(face: Face) -> None:
    request = pb.GenerateRequest(
        text=PROMPT, options=options(n=2, return_token_ids=True, event_ids=True)
    )
    request.options.sampling.ClearField("seed")
    whole = await face.generate(request)
    assert all(event.id for event in whole)
    for count in range(1, len(whole)):
        request.options.last_event_id = whole[count - 1].id
        rest = await face.generate(request)
        assert rest[0].accepted.seed == whole[0].accepted.seed
        assert shown(whole[:count] + rest) == shown(whole)
        assert rest[-1].finished.completion_tokens == 40
        assert rest[-1].id == whole[-1].id and rest[0].id == whole[count - 1].id


async def test_no_ids_where_none_were_asked_for(face: Face) -> None:
    events = await face.generate(pb.GenerateRequest(text=PROMPT, options=options()))
    assert not any(event.id for event in events)


async def test_a_wrong_id_names_its_field(face: Face) -> None:
    whole = await face.generate(pb.GenerateRequest(text=PROMPT, options=options(event_ids=True)))
    for text, last in ((PROMPT, "7"), ("another", whole[-2].id)):
        request = pb.GenerateRequest(text=text, options=options(last_event_id=last))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await face.generate(request)
        error = from_rpc_error(failed.value)
        assert error.field == "options.last_event_id"
        assert error.message.startswith("last_event_id is")


KEY = ("idempotency-key", "k")


async def test_a_key_has_the_same_tokens_at_any_router(world: World) -> None:
    """It runs again there, as a request of its own."""
    await world.start()
    keyed = replace(REQUEST, keyed_stream_id=keyed_stream_id("", "k", 0))
    first, second = await world.ask(keyed), await world.ask(keyed)
    assert first.accepted.request_id != second.accepted.request_id
    assert first.accepted.seed == second.accepted.seed and first.token_ids == second.token_ids
    other = await world.ask(replace(REQUEST, keyed_stream_id=keyed_stream_id("", "l", 0)))
    assert other.token_ids != first.token_ids


async def test_a_kept_stream_over_grpc(face: Face) -> None:
    face.world.pipeline.kept.kept_s = 3600.0
    request = pb.GenerateRequest(
        text=PROMPT, options=options(n=2, return_token_ids=True, event_ids=True)
    )
    whole = [
        answer.event async for answer in face.stub.Generate(request, timeout=120, metadata=(KEY,))
    ]
    for count in range(1, len(whole)):
        asked = pb.ResumeRequest(last_event_id=whole[count - 1].id)
        rest = [answer.event async for answer in face.stub.Resume(asked, timeout=120)]
        assert shown(whole[:count] + rest) == shown(whole)
        assert rest[0].accepted == whole[0].accepted and rest[-1] == whole[-1]
    again = face.stub.Generate(request, timeout=120, metadata=(KEY,))
    assert [answer.event async for answer in again] == whole
    assert len(face.world.decodes[0].starts) == 1
    request.text = "another"
    with pytest.raises(grpc.aio.AioRpcError) as reused:
        async for _ in face.stub.Generate(request, timeout=120, metadata=(KEY,)):
            pass
    assert from_rpc_error(reused.value).message.startswith("Idempotency-Key was")
    face.world.pipeline.kept.close()
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        async for _ in face.stub.Resume(asked, timeout=120):
            pass
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND
    assert "options.last_event_id" in from_rpc_error(missing.value).message
    assert face.world.nothing_left()


async def test_a_run_ends_that_nobody_reads(face: Face) -> None:
    """Its client has gone, and so has everything of it when it is not continued in time."""
    face.world.pipeline.kept.kept_s = 0.01
    request = pb.GenerateRequest(text=PROMPT, options=options(event_ids=True))
    request.options.stop.max_tokens = 1000
    async for _ in face.stub.Generate(request, timeout=120):
        break
    await until(face.world.nothing_left)
