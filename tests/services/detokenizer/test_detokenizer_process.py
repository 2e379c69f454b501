"""The real detokenizer process: sessions over gRPC, from start to SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from batonlm.rpc.convert import token_ids_to_bytes
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.v1 import detokenizer_pb2 as pb
from batonlm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from batonlm.v1.detokenizer_pb2_grpc import DetokenizerStub
from tests.services.detokenizer.drawn_ids import encoded
from tests.services.tokenizer.made_tokenizers import TEXTS, id_of, made
from tests.services.tokenizer.model_folders import write_folder
from tests.services.tokenizer.started import Started, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 120.0
Call = grpc.aio.StreamStreamCall[pb.DetokenizerSessionRequest, pb.DetokenizerSessionResponse]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Started]:
    module = "batonlm.detokenizer.__main__"
    constants = f"{module}.MAX_TEXTS=40,{module}.MAX_UNSENT_BYTES={1 << 20}"
    model = write_folder(folder / "tiny", eos_token="</s>")
    async with started("detokenizer", model, constants=constants) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def alone(tmp_path: Path) -> AsyncIterator[Started]:
    """A process of one test."""
    async with serving(tmp_path) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    async with serving(tmp_path_factory.mktemp("model")) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Started) -> Started:
    """A process of all tests, in which none of their texts is open any more."""
    call = worker_pb2_grpc.WorkerStub(shared.channel).Watch(worker_pb2.WatchRequest())
    async with asyncio.timeout(PATIENCE_S):
        async for told in call:
            if told.HasField("load") and not told.load.running_sequences:
                break
    call.cancel()
    return shared


def opened(text_id: int, ids: Sequence[int] = (), **options: object) -> pb.DetokenizeOperation:
    options.setdefault("skip_special_tokens", True)
    message = pb.OpenText(token_ids=token_ids_to_bytes(ids), **options)  # type: ignore[arg-type]
    return pb.DetokenizeOperation(text_id=text_id, open=message)


def appended(
    text_id: int, position: int, ids: Sequence[int], spell: Sequence[int] = (), **flags: bool
) -> pb.DetokenizeOperation:
    message = pb.AppendTokens(
        position=position,
        token_ids=token_ids_to_bytes(ids),
        spell_token_ids=token_ids_to_bytes(spell),
        last=flags.get("last", False),
        last_is_stop_token=flags.get("last_is_stop_token", False),
    )
    return pb.DetokenizeOperation(text_id=text_id, append=message)


def closed(text_id: int) -> pb.DetokenizeOperation:
    return pb.DetokenizeOperation(text_id=text_id, close=pb.CloseText())


def watched(served: Started) -> AsyncIterator[worker_pb2.WatchResponse]:
    call = worker_pb2_grpc.WorkerStub(served.channel).Watch(worker_pb2.WatchRequest())
    return aiter(call)


class Session:
    """A router's side of the stream; gathers deltas by text."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Call = DetokenizerStub(channel).Session()
        self.deltas: dict[int, list[pb.TextDelta]] = {}
        self.heartbeats = 0
        self.responses = 0

    async def send(self, *operations: pb.DetokenizeOperation) -> None:
        await self.call.write(pb.DetokenizerSessionRequest(operations=operations))

    async def read(self) -> bool:
        """Whether there was a response."""
        async with asyncio.timeout(PATIENCE_S):
            response = await self.call.read()
        if not isinstance(response, pb.DetokenizerSessionResponse):
            return False
        self.heartbeats += response.heartbeat
        self.responses += not response.heartbeat
        for delta in response.deltas:
            self.deltas.setdefault(delta.text_id, []).append(delta)
        return True

    async def read_until_end(self, *text_ids: int) -> None:
        while not all(self.ended(text_id) for text_id in text_ids):
            assert await self.read()

    def ended(self, text_id: int) -> bool:
        deltas = self.deltas.get(text_id, [])
        return any(delta.end or delta.HasField("error") for delta in deltas[-1:])

    def text(self, text_id: int) -> str:
        return "".join(delta.text for delta in self.deltas[text_id])


async def test_many_texts_share_a_session(served: Started) -> None:
    session = Session(served.channel)
    ids = {n: encoded(made("byte_level"), TEXTS[n % len(TEXTS)] * 3) for n in range(32)}
    await session.send(*(opened(n) for n in ids))
    longest = max(map(len, ids.values()))
    for position in range(longest):
        await session.send(
            *(
                appended(n, position, [of[position]], last=position == len(of) - 1)
                for n, of in ids.items()
                if position < len(of)
            )
        )
    await session.read_until_end(*ids)
    for n, of in ids.items():
        assert session.text(n) == made("byte_level").decode(of)
        assert session.deltas[n][-1].num_tokens == len(of)
    # One response a wake-up, never one a token.
    assert session.responses <= 2 * longest
    session.call.cancel()


async def test_stop_strings_positions_and_tokens_bytes(served: Started) -> None:
    session = Session(served.channel)
    ids = encoded(made("byte_level"), "one two END three")
    spell = [id_of(made("byte_level"), "<|user|>"), *encoded(made("byte_level"), "é")]
    await session.send(
        opened(1, stop_strings=["END", "nothing"], token_texts=True),
        appended(1, 0, ids, spell),
        # The text has ended at its stop string: these have no effect.
        appended(1, len(ids), ids, last=True),
        appended(99, 5, ids),
        closed(98),
    )
    await session.read_until_end(1)
    (delta,) = session.deltas[1]
    assert (delta.text, delta.stop.stop_string) == ("one two ", "END")
    before = made("byte_level").decode(ids[: delta.stop.position + 1])
    assert "END" in before and "END" not in made("byte_level").decode(ids[: delta.stop.position])
    assert delta.num_tokens == delta.stop.position + 1 == len(delta.token_texts)
    assert b"".join(delta.token_texts).decode() == before
    assert delta.spelled_texts[0] == b"<|user|>"
    assert b"".join(delta.spelled_texts[1:]).decode() == "é"
    session.call.cancel()


async def test_a_failure_is_one_texts_own(served: Started) -> None:
    session = Session(served.channel)
    ids = encoded(made("byte_level"), "fine")
    await session.send(
        opened(1),
        opened(2, stop_strings=[""]),
        opened(3),
        appended(3, 7, ids),
        opened(4, encoded(made("byte_level"), "é"), delivered_bytes=1),
        pb.DetokenizeOperation(text_id=5, open=pb.OpenText(token_ids=b"123")),
        pb.DetokenizeOperation(text_id=6),
        appended(1, 0, ids, last=True),
    )
    await session.read_until_end(1, 2, 3, 4, 5, 6)
    assert session.text(1) == "fine"
    fields = [session.deltas[n][-1].error.field for n in (2, 3, 4, 5, 6)]
    assert fields == ["stop_strings", "position", "delivered_bytes", "token_ids", "operation"]
    session.call.cancel()


async def test_a_text_moves_with_the_bytes_it_has(served: Started) -> None:
    whole = TEXTS[5]
    ids = encoded(made("byte_level"), whole)
    first, second = Session(served.channel), Session(served.channel)
    await first.send(opened(1), appended(1, 0, ids[:9]))
    while 1 not in first.deltas:
        assert await first.read()
    have = first.text(1)
    first.call.cancel()
    await second.send(
        opened(1, ids[:12], delivered_bytes=len(have.encode())),
        appended(1, 12, ids[12:], last=True),
    )
    await second.read_until_end(1)
    assert have + second.text(1) == whole
    second.call.cancel()


async def test_open_texts_are_bounded(served: Started) -> None:
    session = Session(served.channel)
    await session.send(*(opened(n) for n in range(41)))
    await session.read_until_end(40)
    assert session.deltas[40][0].error.reason == types_pb2.ERROR_REASON_OVERLOADED
    await session.send(closed(0), opened(41), appended(41, 0, [5], last=True))
    await session.read_until_end(41)
    assert not session.deltas[41][-1].HasField("error")
    session.call.cancel()


@pytest.mark.deep
async def test_silence_is_filled_with_signs_of_life(served: Started) -> None:
    session = Session(served.channel)
    await session.send(opened(1))
    while session.heartbeats < 2:
        assert await session.read()
    session.call.cancel()


@pytest.mark.deep
async def test_a_router_that_never_reads_ends_only_its_own_session(served: Started) -> None:
    """All it can make the process keep is the bound, 1 MiB here; then its texts are forgotten."""
    ids = encoded(made("byte_level"), TEXTS[0] * 20)
    parts = [[appended(n, part * len(ids), ids) for n in range(40)] for part in range(300)]

    async def flood(session: Session) -> None:
        with suppress(grpc.aio.AioRpcError):
            await session.send(*(opened(n) for n in range(40)))
            for part in parts:
                await session.send(*part)

    async def read_all(session: Session) -> None:
        while sum(len(delta.text) for delta in session.deltas.get(39, [])) < 100 * len(TEXTS[0]):
            assert await session.read()

    watch = watched(served)

    async def texts_open(count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await anext(watch)).load.running_sequences != count:
                pass

    assert await anext(watch)
    keen, deaf = Session(served.channel), Session(served.channel)
    flooding = asyncio.create_task(flood(keen))
    await read_all(keen)
    await texts_open(40)
    flooding.cancel()
    keen.call.cancel()
    await texts_open(0)

    flooding = asyncio.create_task(flood(deaf))
    await texts_open(40)
    await texts_open(0)
    with pytest.raises(grpc.aio.AioRpcError):
        while await deaf.read():
            pass
    await asyncio.wait((flooding,))
    assert served.resident_mib() < 200


async def test_the_end_of_the_requests_ends_the_session(served: Started) -> None:
    session = Session(served.channel)
    await session.send(opened(1), appended(1, 0, encoded(made("byte_level"), "held")))
    await session.call.done_writing()
    while await session.read():
        pass
    assert session.text(1) == "held"
    assert await session.call.code() is grpc.StatusCode.OK


@pytest.mark.deep
async def test_sigterm_finishes_open_texts_and_takes_no_new_ones(alone: Started) -> None:
    session, idle = Session(alone.channel), Session(alone.channel)
    watch = watched(alone)
    await session.send(opened(1), appended(1, 0, encoded(made("byte_level"), "a b")))
    await idle.send(closed(1))
    assert await session.read()
    alone.terminate()
    async with asyncio.timeout(PATIENCE_S):
        while (await anext(watch)).load.state != worker_pb2.WORKER_STATE_DRAINING:
            pass
    while await idle.read():
        pass
    await session.send(opened(2))
    await session.read_until_end(2)
    assert session.deltas[2][0].error.reason == types_pb2.ERROR_REASON_UNAVAILABLE
    count = len(encoded(made("byte_level"), "a b"))
    await session.send(appended(1, count, encoded(made("byte_level"), " c"), last=True))
    await session.read_until_end(1)
    assert session.text(1) == "a b c"
    assert await alone.exit_code() == 0


async def test_it_tells_what_it_is_and_is_small(alone: Started, tmp_path: Path) -> None:
    watch = watched(alone)
    description = (await anext(watch)).description
    assert description.identity.role == "detokenizer"
    assert description.model.name == "tiny"
    assert description.model.tokenizer_digest == tokenizer_digest(tmp_path / "tiny")
    assert "torch" not in alone.modules() and "nixl" not in alone.modules()
    assert alone.resident_mib() < 120
