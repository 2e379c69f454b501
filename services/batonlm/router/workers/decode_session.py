"""The stream between this router and a decode worker, shared by all requests that run there.

It splits StepFrames and passes each part to its attempt, without blocking. After a break the stream
is resumed from the attempts' next positions; sequences that the worker no longer has fail.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Protocol

import grpc

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.request.attempt import (
    Attempt,
    AttemptKey,
    ChoiceTokens,
    Logprobs,
    SequenceKey,
)
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.rebalance import MoveReason, Stream
from batonlm.core.routing.routing import PrefixPlan, is_stalled
from batonlm.router.workers.shared_stream import Broadcast, SharedStream, WorkerStalled
from batonlm.rpc.convert import (
    attempt_to_proto,
    choice_tokens_from_proto,
    error_from_proto,
    identity_to_proto,
    logprobs_to_proto,
)
from batonlm.rpc.loop import Clock
from batonlm.v1.decode_pb2 import (
    CancelSequence,
    ConfirmPositions,
    HandOverSequence,
    KvSource,
    SequenceHandedOver,
    SequencePosition,
    SequenceStarted,
    SessionHello,
    SessionRequest,
    SessionResponse,
    StartSequence,
    StepFrame,
    WantSequences,
)
from batonlm.v1.decode_pb2_grpc import DecodeStub

log = logging.getLogger(__name__)


class SequenceSink(Protocol):
    """An attempt as the session sees it. No method blocks."""

    def on_tokens(self, tokens: ChoiceTokens) -> None: ...

    def on_kv_complete(self, started: SequenceStarted) -> None:
        """Decode has all KV of the attempt."""

    def on_migrated_out(self, choice: int, handover_id: bytes, position: int | None) -> None:
        """Answers `hand_over`: the choice's KV is offered and all its tokens below the position
        have arrived; None: the choice stays."""

    def on_failed(self, error: BatonError, choices: Collection[int]) -> None:
        """These choices failed, or all when none is named."""

    def on_adopted(self) -> None:
        """Another router has adopted what fails next."""

    def next_positions(self) -> dict[SequenceKey, int]:
        """Returns the next output position of each running sequence."""

    def movable(self) -> Sequence[Stream]:
        """Returns sequences that decode and could continue on another worker."""

    def move(self, move: Migration) -> None:
        """One of them is to migrate."""


class DecodeSession(SharedStream[SessionRequest, SessionResponse]):
    """The session of one decode worker. The outbox holds at most one message of a kind per attempt
    or sequence."""

    resumable = True

    def __init__(
        self,
        channel: grpc.aio.Channel,
        worker: WorkerIdentity,
        router: WorkerIdentity,
        changed: Broadcast,
        awake: Clock,
    ) -> None:
        super().__init__(changed, awake)
        self._stub = DecodeStub(channel)
        self.worker = worker
        self._router = router
        self._sinks: dict[tuple[str, int], SequenceSink] = {}
        """By AttemptKey, looked up by a plain tuple, because that happens for every token."""
        self._starts: dict[AttemptKey, SessionRequest] = {}
        self._hand_overs: dict[SequenceKey, SessionRequest] = {}
        self._asked: dict[SequenceKey, SessionRequest] = {}
        """Hand-over requests without an answer, which are repeated after a break."""
        self._wanted: set[bytes] = set()
        self._cancels: dict[AttemptKey, set[int]] = {}
        """Choices by attempt; none: all of them."""
        self._confirms: dict[SequenceKey, int] = {}
        self._confirmed: dict[AttemptKey, dict[SequenceKey, int]] = {}
        """The newest confirmed position of each sequence, sent again after a break because the last
        message may be lost."""

    def start(
        self,
        attempt: Attempt,
        sink: SequenceSink,
        *,
        handover_id: bytes = b"",
        sender: WorkerIdentity | None = None,
        max_unconfirmed: int = 0,
        plan: PrefixPlan | None = None,
        adoption_ids: Sequence[bytes] = (),
        adopts: bool = False,
        logprobs: Iterable[Logprobs] = (),
    ) -> None:
        """Starts an attempt; `release` ends it. Without a sender decode prefills, behind what it
        collects by the plan.

        sender: the worker that has its KV. The worker itself goes on with the sequence whose KV it
        offered under this hand-over. adoption_ids: of each choice, for the router that goes on with
        it when this one is gone; none: none does. adopts: the worker goes on with the sequence that
        it reports under this id. logprobs: of the output tokens in the input, for that router, too.
        """
        start = StartSequence(
            attempt=attempt_to_proto(attempt),
            max_unconfirmed=max_unconfirmed,
            adoption_ids=adoption_ids,
            adopts=adopts,
            logprobs=logprobs_to_proto(logprobs),
        )
        if sender == self.worker:
            start.held_handover_id = handover_id
        elif sender is not None:
            start.source.CopyFrom(
                KvSource(handover_id=handover_id, sender=identity_to_proto(sender))
            )
        elif plan is not None:
            start.prefix_sender.CopyFrom(identity_to_proto(plan.sender))
        self._sinks[attempt.key] = sink
        self._starts[attempt.key] = SessionRequest(start=start)
        self.wake()

    def sinks(self) -> list[SequenceSink]:
        """Returns all attempts that were started and not released."""
        return list(self._sinks.values())

    def hand_over(self, key: SequenceKey, handover_id: bytes, receiver: WorkerIdentity) -> None:
        """Asks the worker to hand a sequence over to another worker. `on_migrated_out` gets the
        answer."""
        wish = HandOverSequence(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            handover_id=handover_id,
            receiver_instance_id=receiver.instance_id,
        )
        self._hand_overs[key] = self._asked[key] = SessionRequest(hand_over=wish)
        self.wake()

    def want(self, adoption_ids: Collection[bytes]) -> None:
        """Has the worker report these sequences, whether their router is connected or not. It is
        said once: whoever waits for the report does not wait for long."""
        self._wanted.update(adoption_ids)
        self.wake()

    def cancel(self, key: AttemptKey, choice: int) -> None:
        """Stops one choice of an attempt that continues."""
        if self._cancels.get(key) != set():
            self._cancels.setdefault(key, set()).add(choice)
        self.wake()

    def confirm(self, key: SequenceKey, position: int) -> None:
        """Positions below this one contain no stop string."""
        self._confirms[key] = position
        of_attempt = self._confirmed.setdefault(AttemptKey(key.request_id, key.attempt), {})
        of_attempt[key] = position
        self.wake()

    def release(self, key: AttemptKey, *, cancel: bool) -> None:
        """Ends an attempt. cancel: the worker may still run it."""
        known = self._sinks.pop(key, None) is not None
        self._cancels.pop(key, None)
        for sequence in self._confirmed.pop(key, {}):
            self._confirms.pop(sequence, None)
        for sequence in [s for s in self._asked if (s.request_id, s.attempt) == key]:
            del self._asked[sequence]
            self._hand_overs.pop(sequence, None)
        if self._starts.pop(key, None) is None and known and cancel:
            self._cancels[key] = set()
            self.wake()

    def connect(self) -> grpc.aio.StreamStreamCall[SessionRequest, SessionResponse]:
        return self._stub.Session()

    def greeting(self) -> Sequence[SessionRequest]:
        # An attempt whose start is still in the outbox is new to the worker, not resumed.
        resume = [
            _position(key, position)
            for attempt_key, sink in self._sinks.items()
            if attempt_key not in self._starts
            for key, position in sink.next_positions().items()
        ]
        for positions in self._confirmed.values():
            self._confirms |= positions
        self._hand_overs |= self._asked
        hello = SessionHello(
            router=identity_to_proto(self._router),
            decode_instance_id=self.worker.instance_id,
            resume=resume,
        )
        return [SessionRequest(hello=hello)]

    def outgoing(self) -> Sequence[SessionRequest]:
        starts, self._starts = self._starts, {}
        hand_overs, self._hand_overs = self._hand_overs, {}
        cancels, self._cancels = self._cancels, {}
        confirms, self._confirms = self._confirms, {}
        wanted, self._wanted = self._wanted, set()
        messages = [*starts.values(), *hand_overs.values()]
        messages += [
            SessionRequest(
                cancel=CancelSequence(
                    request_id=key.request_id, attempt=key.attempt, choices=sorted(choices)
                )
            )
            for key, choices in cancels.items()
        ]
        if confirms:
            positions = [_position(key, position) for key, position in confirms.items()]
            messages.append(SessionRequest(confirm=ConfirmPositions(sequences=positions)))
        if wanted:
            messages.append(SessionRequest(want=WantSequences(adoption_ids=wanted)))
        return messages

    def incoming(self, message: SessionResponse) -> None:
        match message.WhichOneof("message"):
            case "frame":
                self._frame(message.frame)
            case "heartbeat":
                beat = message.heartbeat
                if is_stalled(beat.step_age_us, beat.step_predicted_us):
                    raise WorkerStalled
            case "welcome":
                for lost in message.welcome.lost:
                    self._failed(
                        AttemptKey(lost.request_id, lost.attempt),
                        Unavailable("A worker of this request was lost."),
                        (lost.choice,),
                    )
            case _:
                # Newer workers may send messages that this version does not support.
                log.debug("a message of an unknown kind on a session")

    def lose(self, error: BatonError) -> None:
        sinks, self._sinks = self._sinks, {}
        self._starts.clear()
        self._hand_overs.clear()
        self._asked.clear()
        self._wanted.clear()
        self._cancels.clear()
        self._confirms.clear()
        self._confirmed.clear()
        for sink in sinks.values():
            sink.on_failed(error, ())

    def _frame(self, frame: StepFrame) -> None:
        for started in frame.started:
            sink = self._sinks.get(AttemptKey(started.request_id, started.attempt))
            if sink is not None:
                sink.on_kv_complete(started)
        sinks = self._sinks
        for entry in frame.tokens:
            tokens = choice_tokens_from_proto(entry)
            request_id, _, attempt = tokens.key
            sink = sinks.get((request_id, attempt))
            if sink is not None:
                sink.on_tokens(tokens)
        for given in frame.handed_over:
            self._migrated_out(given)
        for failure in frame.failures:
            key = AttemptKey(failure.request_id, failure.attempt)
            sink = self._sinks.get(key)
            if failure.adopted and sink is not None:
                sink.on_adopted()
            self._failed(key, error_from_proto(failure.error), tuple(failure.choices))

    def _migrated_out(self, given: SequenceHandedOver) -> None:
        key = SequenceKey(given.request_id, given.choice, given.attempt)
        sink = self._sinks.get(AttemptKey(given.request_id, given.attempt))
        if self._asked.pop(key, None) is not None and sink is not None:
            position = given.position if given.HasField("position") else None
            sink.on_migrated_out(given.choice, given.handover_id, position)

    def _failed(self, key: AttemptKey, error: BatonError, choices: Collection[int]) -> None:
        sink = self._sinks.get(key)
        if sink is not None:
            sink.on_failed(error, choices)


def _position(key: SequenceKey, position: int) -> SequencePosition:
    return SequencePosition(
        request_id=key.request_id, choice=key.choice, attempt=key.attempt, position=position
    )


class MigrationOutcome(Enum):
    STAYED = "stayed"
    """The sequence continues where it is, or ended there."""
    MOVED = "moved"
    RETURNED = "returned"
    """Its KV was offered and did not arrive. The sequence continues where it was."""
    FAILED = "failed"
    """The same, and its old worker does not have it any more either. The request continues by
    prefilling again."""
    DROPPED = "dropped"
    """The request ended meanwhile."""


class Migration:
    """The migration of one sequence. Only the first outcome counts."""

    def __init__(
        self,
        key: SequenceKey,
        sender: DecodeSession,
        receiver: WorkerIdentity,
        reason: MoveReason = MoveReason.DRAIN,
    ) -> None:
        """key: the sequence as its present worker identifies it."""
        self.key = key
        self.receiver = receiver
        self.reason = reason
        self.handover_id = secrets.token_bytes(HANDOVER_ID_BYTES)
        self.outcome: MigrationOutcome | None = None
        self.returning = False
        """Whether the KV did not arrive, and the sequence is to continue where it was."""
        self._sender = sender
        self._over = asyncio.Event()

    @property
    def sender(self) -> WorkerIdentity:
        return self._sender.worker

    @property
    def destination(self) -> WorkerIdentity:
        """The worker on which the sequence is to continue."""
        return self.sender if self.returning else self.receiver

    def ask(self) -> None:
        """Asks the worker to offer the sequence. The attempt gets the answer."""
        self._sender.hand_over(self.key, self.handover_id, self.receiver)

    def stayed(self) -> None:
        self._end(MigrationOutcome.STAYED)

    def arrived(self) -> None:
        """The sequence runs on."""
        self._end(MigrationOutcome.RETURNED if self.returning else MigrationOutcome.MOVED)

    def failed(self) -> None:
        self._take_back(MigrationOutcome.FAILED)

    def dropped(self) -> None:
        self._take_back(MigrationOutcome.DROPPED)

    async def over(self) -> MigrationOutcome:
        """Waits for the outcome."""
        await self._over.wait()
        assert self.outcome is not None
        return self.outcome

    def _take_back(self, outcome: MigrationOutcome) -> None:
        """The KV will not be collected, so the sender can free it."""
        if self.outcome is None:
            whole = AttemptKey(self.key.request_id, self.key.attempt)
            self._sender.cancel(whole, self.key.choice)
        self._end(outcome)

    def _end(self, outcome: MigrationOutcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
        self._over.set()
