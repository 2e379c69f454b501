"""A router's end of one decode session, as small as a test needs it; fences as the router does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from batonlm.core.errors import BatonError
from batonlm.core.request.attempt import Attempt, AttemptKey, Logprobs, SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import FinishReason
from batonlm.rpc.convert import (
    attempt_to_proto,
    choice_tokens_from_proto,
    error_from_proto,
    identity_to_proto,
    logprobs_to_proto,
)
from batonlm.v1 import decode_pb2 as pb
from tests.services.worker.pair import Pair, keys_of, until

if TYPE_CHECKING:
    from batonlm.v1.decode_pb2_grpc import DecodeAsyncStub


class RouterEnd:
    """Tokens by sequence, from the first position on. `gaps` must stay empty.

    firsts: position of the first token that each stream brought, newest stream last.
    """

    def __init__(
        self,
        stub: DecodeAsyncStub,
        decode: WorkerIdentity,
        sender: WorkerIdentity,
        instance_id: str = "",
    ) -> None:
        self._stub, self._decode, self._sender = stub, decode, sender
        self._turn = asyncio.Lock()
        self.identity = WorkerIdentity("router", instance_id or secrets.token_hex(16), "")
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.logprobs: dict[SequenceKey, list[Logprobs]] = {}
        self.positions: dict[SequenceKey, int] = {}
        self.ends: dict[SequenceKey, FinishReason] = {}
        self.failures: list[tuple[AttemptKey, tuple[int, ...], BatonError]] = []
        self.adopted: list[AttemptKey] = []
        """Those of which a choice belongs to another router now."""
        self.started: dict[AttemptKey, pb.SequenceStarted] = {}
        self.lost: list[SequenceKey] = []
        self.migrated_out: dict[SequenceKey, tuple[bytes, int | None]] = {}
        self.gaps: list[tuple[SequenceKey, int]] = []
        self.num_heartbeats = 0
        self.firsts: dict[SequenceKey, int] = {}
        self.call: Any = None
        self.reading: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, world: Pair, instance_id: str = "") -> RouterEnd:
        return cls(world.decode_stub, world.decode.identity, world.prefill.identity, instance_id)

    async def connect(self, resume: Mapping[SequenceKey, int] | None = None) -> None:
        """Opens a stream, next to any that is open, and waits for the welcome."""
        self.call = self._stub.Session()
        self.firsts = {}
        await self.say(
            hello=pb.SessionHello(
                router=identity_to_proto(self.identity),
                decode_instance_id=self._decode.instance_id,
                resume=[position(key, at) for key, at in (resume or {}).items()],
            )
        )
        welcome = (await self.call.read()).welcome
        self.lost = [SequenceKey(e.request_id, e.choice, e.attempt) for e in welcome.lost]
        self.reading = asyncio.create_task(self._read(self.call))

    async def say(self, **message: Any) -> None:
        async with self._turn:
            await self.call.write(pb.SessionRequest(**message))

    async def start(
        self,
        attempt: Attempt,
        handover_id: bytes = b"",
        max_unconfirmed: int = 0,
        sender: WorkerIdentity | None = None,
        held_handover_id: bytes = b"",
        prefix_sender: WorkerIdentity | None = None,
        adoption_ids: Sequence[bytes] = (),
        *,
        adopts: bool = False,
        logprobs: Sequence[Logprobs] = (),
    ) -> None:
        for key in keys_of(attempt):
            self.positions.setdefault(key, attempt.position)
            self.tokens.setdefault(key, [])
        start = pb.StartSequence(
            attempt=attempt_to_proto(attempt),
            max_unconfirmed=max_unconfirmed,
            held_handover_id=held_handover_id,
            adoption_ids=adoption_ids,
            adopts=adopts,
            logprobs=logprobs_to_proto(logprobs),
        )
        if prefix_sender is not None:
            start.prefix_sender.CopyFrom(identity_to_proto(prefix_sender))
        if handover_id:
            start.source.handover_id = handover_id
            start.source.sender.CopyFrom(identity_to_proto(sender or self._sender))
        await self.say(start=start)

    async def hand_over(
        self, key: SequenceKey, handover_id: bytes, receiver: WorkerIdentity | None = None
    ) -> None:
        """Asks that a sequence be handed over. receiver: None is this very worker."""
        wish = pb.HandOverSequence(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            handover_id=handover_id,
            receiver_instance_id=(receiver or self._decode).instance_id,
        )
        await self.say(hand_over=wish)

    async def cancel(self, attempt: Attempt, *choices: int) -> None:
        cancel = pb.CancelSequence(
            request_id=attempt.request_id, attempt=attempt.attempt, choices=choices
        )
        await self.say(cancel=cancel)

    async def want(self, *adoption_ids: bytes) -> None:
        await self.say(want=pb.WantSequences(adoption_ids=adoption_ids))

    async def confirm(self, key: SequenceKey, at: int) -> None:
        await self.say(confirm=pb.ConfirmPositions(sequences=[position(key, at)]))

    def next_positions(self) -> dict[SequenceKey, int]:
        return {key: self.positions[key] + len(ids) for key, ids in self.tokens.items()}

    async def ended(self, attempt: Attempt) -> dict[int, list[int]]:
        """Waits until every choice has ended; their tokens."""
        await until(
            lambda: (
                bool(self.failures or self.gaps) or all(k in self.ends for k in keys_of(attempt))
            )
        )
        assert not self.failures, self.failures[0][2].message
        assert not self.gaps
        return {key.choice: self.tokens[key] for key in keys_of(attempt)}

    async def failed(self, attempt: Attempt) -> BatonError:
        """Waits until the attempt, or a choice of it, fails."""
        await until(lambda: any(key == attempt.key for key, _, _ in self.failures))
        return next(error for key, _, error in self.failures if key == attempt.key)

    async def break_off(self) -> None:
        """The connection is gone, as when the router died."""
        self.call.cancel()
        if self.reading is not None:
            await asyncio.gather(self.reading, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._take(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    def _take(self, response: pb.SessionResponse) -> None:
        self.num_heartbeats += response.HasField("heartbeat")
        for started in response.frame.started:
            self.started[AttemptKey(started.request_id, started.attempt)] = started
        for entry in response.frame.tokens:
            made = choice_tokens_from_proto(entry)
            ids = self.tokens.setdefault(made.key, [])
            self.firsts.setdefault(made.key, made.position)
            have = self.positions.setdefault(made.key, made.position) + len(ids)
            if made.position > have:
                self.gaps.append((made.key, made.position))
                continue
            ids += made.token_ids[have - made.position :]
            scores = self.logprobs.setdefault(made.key, [])
            scores += made.logprobs[have - made.position :]
            if made.finish_reason is not None:
                self.ends[made.key] = made.finish_reason
        for given in response.frame.handed_over:
            sequence = SequenceKey(given.request_id, given.choice, given.attempt)
            position = given.position if given.HasField("position") else None
            self.migrated_out[sequence] = (given.handover_id, position)
        for failure in response.frame.failures:
            key = AttemptKey(failure.request_id, failure.attempt)
            self.adopted += [key] * failure.adopted
            self.failures.append((key, tuple(failure.choices), error_from_proto(failure.error)))


def position(key: SequenceKey, at: int) -> pb.SequencePosition:
    return pb.SequencePosition(
        request_id=key.request_id, choice=key.choice, attempt=key.attempt, position=at
    )


@asynccontextmanager
async def router(world: Pair, instance_id: str = "") -> AsyncIterator[RouterEnd]:
    """A connected router."""
    end = RouterEnd.of(world, instance_id)
    await end.connect()
    try:
        yield end
    finally:
        await end.break_off()
