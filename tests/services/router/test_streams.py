"""The shared streams' outboxes and the patience with them, without any worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

import grpc
import pytest

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.request.attempt import Attempt, ChoiceTokens, SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.routing.rebalance import Stream
from batonlm.router.workers.decode_session import DecodeSession, Migration
from batonlm.router.workers.detokenizer_session import DetokenizerSession
from batonlm.router.workers.shared_stream import MAX_REFUSALS, SILENCE_S, Broadcast, ReconnectPolicy
from batonlm.rpc.convert import choice_tokens_to_proto, error_to_proto, token_ids_to_bytes
from batonlm.v1 import decode_pb2, detokenizer_pb2

ROUTER = WorkerIdentity("router", "r", "")
DECODE = WorkerIdentity("decode", "d", "")
PREFILL = WorkerIdentity("prefill", "p", "")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """Nobody listens there, and nothing here calls."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as made:
        yield made


@dataclass
class Sink:
    """An attempt that only listens."""

    positions: dict[SequenceKey, int] = field(default_factory=dict)
    tokens: list[ChoiceTokens] = field(default_factory=list)
    failures: list[tuple[BatonError, tuple[int, ...]]] = field(default_factory=list)
    migrated_out: list[tuple[int, bytes, int | None]] = field(default_factory=list)
    adopted: int = 0

    def on_tokens(self, tokens: ChoiceTokens) -> None:
        self.tokens.append(tokens)

    def on_kv_complete(self, started: decode_pb2.SequenceStarted) -> None:
        pass

    def on_failed(self, error: BatonError, choices: Collection[int]) -> None:
        self.failures.append((error, tuple(choices)))

    def on_adopted(self) -> None:
        self.adopted += 1

    def on_migrated_out(self, choice: int, handover_id: bytes, position: int | None) -> None:
        self.migrated_out.append((choice, handover_id, position))

    def next_positions(self) -> dict[SequenceKey, int]:
        return self.positions

    def movable(self) -> list[Stream]:
        return []

    def move(self, move: Migration) -> None:
        raise NotImplementedError


def attempt(number: int = 0) -> Attempt:
    return Attempt("r", number, (0, 1), (1, 2), 2, SamplingParams(), StopParams(8))


def kinds(messages: Collection[decode_pb2.SessionRequest]) -> list[str | None]:
    return [message.WhichOneof("message") for message in messages]


async def test_a_start_is_sent_once_with_its_source(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(), Sink(), handover_id=b"h" * 16, sender=PREFILL, max_unconfirmed=8)
    (message,) = session.outgoing()
    assert message.start.source.handover_id == b"h" * 16
    assert message.start.source.sender.instance_id == "p"
    assert message.start.max_unconfirmed == 8
    assert session.outgoing() == []


async def test_a_worker_goes_on_with_its_own_sequence(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(), Sink(), handover_id=b"h" * 16, sender=DECODE)
    (message,) = session.outgoing()
    assert message.start.held_handover_id == b"h" * 16
    assert not message.start.HasField("source")


async def test_what_was_never_sent_needs_no_cancel(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(), Sink())
    session.release(attempt().key, cancel=True)
    assert session.outgoing() == []


async def test_a_choice_is_cancelled_after_its_start(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(), Sink())
    session.cancel(attempt().key, 1)
    assert kinds(session.outgoing()) == ["start", "cancel"]
    session.release(attempt().key, cancel=True)
    session.cancel(attempt().key, 1)
    (message,) = session.outgoing()
    assert list(message.cancel.choices) == [], "all of them, also after one more is named"
    session.release(attempt().key, cancel=True)
    assert session.outgoing() == [], "it is forgotten already"


async def test_only_the_newest_confirmation_is_sent(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    for position in (1, 5, 9):
        session.confirm(SequenceKey("r", 0, 0), position)
    (message,) = session.outgoing()
    assert [entry.position for entry in message.confirm.sequences] == [9]


async def test_confirmations_are_said_again_over_a_new_stream(channel: grpc.aio.Channel) -> None:
    """One that was on its way when the stream broke would else hold its sequence for ever."""
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(0), Sink())
    session.start(attempt(1), Sink())
    session.confirm(SequenceKey("r", 0, 0), 5)
    session.confirm(SequenceKey("r", 0, 1), 3)
    session.outgoing()
    session.release(attempt(1).key, cancel=False)
    session.greeting()
    (message,) = session.outgoing()
    assert [(e.attempt, e.position) for e in message.confirm.sequences] == [(0, 5)]
    session.release(attempt(0).key, cancel=False)
    session.greeting()
    assert session.outgoing() == []


async def test_a_hand_over_is_asked_for_until_it_is_answered(channel: grpc.aio.Channel) -> None:
    session, sink = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic), Sink()
    session.start(attempt(), sink)
    for choice in range(2):
        session.hand_over(SequenceKey("r", choice, 0), bytes([choice]) * 16, PREFILL)
    assert kinds(session.outgoing()) == ["start", "hand_over", "hand_over"]
    answer = decode_pb2.SequenceHandedOver(
        request_id="r", choice=1, handover_id=b"\1" * 16, position=7
    )
    frame = decode_pb2.StepFrame(handed_over=[answer, answer])
    session.incoming(decode_pb2.SessionResponse(frame=frame))
    assert sink.migrated_out == [(1, b"\1" * 16, 7)]
    session.greeting()
    (message,) = session.outgoing()
    assert message.hand_over.choice == 0
    assert message.hand_over.receiver_instance_id == "p"
    answer = decode_pb2.SequenceHandedOver(request_id="r", handover_id=bytes(16))
    session.incoming(decode_pb2.SessionResponse(frame=decode_pb2.StepFrame(handed_over=[answer])))
    assert sink.migrated_out[1:] == [(0, bytes(16), None)]
    session.hand_over(SequenceKey("r", 0, 0), bytes(16), PREFILL)
    session.release(attempt().key, cancel=False)
    session.greeting()
    assert session.outgoing() == []


async def test_a_hello_resumes_what_the_worker_knows(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    session.start(attempt(0), Sink({SequenceKey("r", 0, 0): 7}))
    session.outgoing()
    session.start(attempt(1), Sink({SequenceKey("r", 1, 1): 0}))
    (message,) = session.greeting()
    assert message.hello.decode_instance_id == "d"
    assert [(e.attempt, e.choice, e.position) for e in message.hello.resume] == [(0, 0, 7)]
    assert kinds(session.outgoing()) == ["start"], "the other one is still to be started"


async def test_frames_go_to_their_attempt_and_nowhere_else(channel: grpc.aio.Channel) -> None:
    session = DecodeSession(channel, DECODE, ROUTER, Broadcast(), time.monotonic)
    sinks = [Sink(), Sink()]
    for number, sink in enumerate(sinks):
        session.start(attempt(number), sink)
    entries = [ChoiceTokens(SequenceKey("r", 0, number), 0, (5,)) for number in (0, 1, 7)]
    frame = decode_pb2.StepFrame(
        tokens=[choice_tokens_to_proto(entry) for entry in entries],
        failures=[
            decode_pb2.SequenceFailure(
                request_id="r",
                attempt=1,
                choices=[1],
                error=error_to_proto(Unavailable("x")),
                adopted=True,
            )
        ],
    )
    session.incoming(decode_pb2.SessionResponse(frame=frame))
    assert [sink.tokens for sink in sinks] == [[entries[0]], [entries[1]]]
    assert [choices for _, choices in sinks[1].failures] == [(1,)]
    assert [sink.adopted for sink in sinks] == [0, 1]
    session.lose(Unavailable("gone"))
    assert [choices for _, choices in sinks[0].failures] == [()]
    session.incoming(decode_pb2.SessionResponse(frame=frame))
    assert len(sinks[0].tokens) == 1


@dataclass
class Source:
    """A text that always has one more token."""

    opened: int = 0
    lost: list[BatonError] = field(default_factory=list)

    def open_text(self, text: detokenizer_pb2.OpenText) -> None:
        self.opened += 1

    def append_tokens(self, add: Callable[[], detokenizer_pb2.AppendTokens]) -> None:
        add().token_ids = token_ids_to_bytes((1,))

    def on_delta(self, delta: detokenizer_pb2.TextDelta) -> None:
        pass

    def on_lost(self, error: BatonError) -> None:
        self.lost.append(error)


def operations(session: DetokenizerSession) -> list[tuple[int, str | None]]:
    return [
        (operation.text_id, operation.WhichOneof("operation"))
        for message in session.outgoing()
        for operation in message.operations
    ]


@pytest.mark.parametrize("ending", ["error", "end", "close"])
async def test_a_text_that_is_over_is_not_asked_for_more(
    channel: grpc.aio.Channel, ending: str
) -> None:
    """It may still be marked as having more tokens: that must not end the stream for all others."""
    session, source = DetokenizerSession(channel, Broadcast(), time.monotonic), Source()
    text_id = session.open(source, time.monotonic() + 60)
    assert operations(session) == [], "until there are tokens the worker need not know"
    session.touch(text_id)
    assert operations(session) == [(text_id, "open"), (text_id, "append")]
    session.touch(text_id)
    delta = detokenizer_pb2.TextDelta(text_id=text_id)
    if ending == "error":
        delta.error.CopyFrom(error_to_proto(Unavailable("x")))
    delta.end = ending == "end"
    session.incoming(detokenizer_pb2.DetokenizerSessionResponse(deltas=[delta]))
    if ending == "close":
        session.close(text_id)
    session.touch(text_id)
    assert operations(session) == ([(text_id, "close")] if ending == "close" else [])
    assert session.num_texts == 0
    assert len(source.lost) == (ending == "error")


async def test_many_texts_share_messages_of_bounded_size(channel: grpc.aio.Channel) -> None:
    session = DetokenizerSession(channel, Broadcast(), time.monotonic)
    for _ in range(200):
        session.touch(session.open(Source(), time.monotonic() + 60))
    messages = session.outgoing()
    assert [len(message.operations) for message in messages] == [256, 144]


def test_grace_ends_with_silence_or_refusals() -> None:
    now = [0.0]
    grace = ReconnectPolicy(lambda: now[0])
    for _ in range(MAX_REFUSALS):
        grace.failed()
        assert not grace.spent
    grace.failed()
    assert grace.spent
    grace.alive()
    assert not grace.spent
    now[0] += SILENCE_S
    assert grace.spent
    grace.alive()
    grace.give_up()
    assert grace.spent


async def test_a_notice_wakes_all_who_wait_and_nobody_later() -> None:
    notice = Broadcast()
    waiting = [asyncio.create_task(notice.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    notice.set()
    await asyncio.gather(*waiting)
    late = asyncio.create_task(notice.wait())
    await asyncio.sleep(0.01)
    assert not late.done()
    notice.set()
    await late
    await notice.wait(timeout_s=0.001)
