"""The scripted decode worker: one token a step a sequence, and many ways to break its word."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import BatonError, Unavailable
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from baton.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    error_to_proto,
    identity_to_proto,
)
from baton.rpc.server import Service
from baton.v1 import decode_pb2, decode_pb2_grpc
from tests.services.router import language
from tests.services.router.workers import (
    HEARTBEAT_S,
    Context,
    FakeWorker,
    KvNetwork,
    sample,
    scores,
)


@dataclass
class _Running:
    """One attempt at the fake decode worker."""

    attempt: Attempt
    handover_id: bytes
    max_unconfirmed: int
    choices: set[int]
    outputs: dict[int, list[ChoiceTokens]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    confirmed: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    ready: bool = False
    told: bool = False


Tamper = Callable[[list[ChoiceTokens]], Iterable[ChoiceTokens]]


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """`tamper` sees a frame's tokens before they go out. `stepping`: cleared, no step runs.
    `collecting`: cleared, no KV comes in. `silent`: not even a heartbeat goes out. `keeping`: gives
    no sequence away. `scoring`: cleared, prompts' log-probabilities are never told.
    """

    role = "decode"
    layout = language.LAYOUT

    def __init__(self, network: KvNetwork, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.keeping = False
        self.wishes: list[decode_pb2.HandOverSequence] = []
        self.giving: dict[SequenceKey, bytes] = {}
        self._answers: list[decode_pb2.SequenceHandedOver] = []
        self.running: dict[AttemptKey, _Running] = {}
        self.starts: list[Attempt] = []
        self.cancels: list[tuple[AttemptKey, tuple[int, ...]]] = []
        self.furthest_ahead = 0
        self.stepping = asyncio.Event()
        self.stepping.set()
        self.collecting = asyncio.Event()
        self.collecting.set()
        self.silent = False
        self.scoring = True
        self.tamper: Tamper = lambda tokens: tokens
        self.step_s = 0.001
        self.break_stream = asyncio.Event()
        self.hellos: list[decode_pb2.SessionHello] = []
        self._failures: list[decode_pb2.SequenceFailure] = []
        self._started: list[decode_pb2.SequenceStarted] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def service(self) -> Service:
        return Service(
            "baton.v1.Decode",
            lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(self, server),
        )

    def holds(self) -> list[SequenceKey]:
        """Sequences that have not ended: they would hold blocks."""
        return [
            SequenceKey(key.request_id, choice, key.attempt)
            for key, running in self.running.items()
            for choice in running.choices
            if not running.outputs[choice] or running.outputs[choice][-1].finish_reason is None
        ]

    def die(self) -> None:
        for task in self._tasks:
            task.cancel()
        for handover_id in self.giving.values():
            self.network.withdraw(handover_id)
        self.giving.clear()
        self.running.clear()

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        hello = (await anext(request_iterator)).hello
        if hello.decode_instance_id != self.identity.instance_id:
            raise Unavailable("another instance id lives here")
        self.hellos.append(hello)
        self.break_stream.clear()
        yield decode_pb2.SessionResponse(welcome=self._resume(hello))
        reader = asyncio.create_task(self._read(request_iterator))
        silent_since = asyncio.get_running_loop().time()
        try:
            while not reader.done():
                await asyncio.sleep(self.step_s)
                if self.break_stream.is_set():
                    raise Unavailable("the stream is broken on purpose")
                frame = self._step()
                now = asyncio.get_running_loop().time()
                if self.silent:
                    continue
                if frame.tokens or frame.failures or frame.started or frame.handed_over:
                    silent_since = now
                    yield decode_pb2.SessionResponse(frame=frame)
                elif now - silent_since > HEARTBEAT_S:
                    silent_since = now
                    yield decode_pb2.SessionResponse(heartbeat=decode_pb2.Heartbeat())
        finally:
            reader.cancel()

    def _resume(self, hello: decode_pb2.SessionHello) -> decode_pb2.SessionWelcome:
        lost, kept = [], defaultdict(set)
        for entry in hello.resume:
            key = AttemptKey(entry.request_id, entry.attempt)
            running = self.running.get(key)
            if running is None or entry.choice not in running.attempt.choices:
                lost.append(entry)
            else:
                kept[key].add(entry.choice)
                running.sent[entry.choice] = entry.position - running.attempt.position
        for key in list(self.running):
            if key not in kept:
                del self.running[key]
        return decode_pb2.SessionWelcome(decode=identity_to_proto(self.identity), lost=lost)

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "start":
                    self._start(request.start)
                case "cancel":
                    key = AttemptKey(request.cancel.request_id, request.cancel.attempt)
                    self.cancels.append((key, tuple(request.cancel.choices)))
                    self._cancel(key, tuple(request.cancel.choices))
                case "hand_over":
                    self._hand_over(request.hand_over)
                case "confirm":
                    for entry in request.confirm.sequences:
                        running = self.running.get(AttemptKey(entry.request_id, entry.attempt))
                        if running is not None:
                            running.confirmed[entry.choice] = entry.position

    def _start(self, start: decode_pb2.StartSequence) -> None:
        attempt = attempt_from_proto(start.attempt)
        self.starts.append(attempt)
        try:
            self.refuse()
        except BatonError as error:
            self._fail(attempt.key, error)
            return
        running = self.running[attempt.key] = _Running(
            attempt, start.source.handover_id, start.max_unconfirmed, set(attempt.choices)
        )
        if running.handover_id:
            task = asyncio.create_task(self._collect(running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            running.ready = True

    def _hand_over(self, wish: decode_pb2.HandOverSequence) -> None:
        self.wishes.append(wish)
        key = SequenceKey(wish.request_id, wish.choice, wish.attempt)
        answer = decode_pb2.SequenceHandedOver(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            handover_id=wish.handover_id,
        )
        self._answers.append(answer)
        running = self.running.get(AttemptKey(key.request_id, key.attempt))
        if running is None or key.choice not in running.choices or self.keeping:
            return
        made = running.outputs[key.choice]
        if not made or made[-1].finish_reason is not None:
            return
        answer.position = running.attempt.position + len(made)
        running.leaving.add(key.choice)
        self.giving[key] = wish.handover_id
        self.network.offer(wish.handover_id).set_result([made[-1]])
        self.network.on_collected[wish.handover_id] = lambda: self._gone(key)

    def _gone(self, key: SequenceKey) -> None:
        """Another worker has the sequence."""
        self._cancel(AttemptKey(key.request_id, key.attempt), (key.choice,))

    def _cancel(self, key: AttemptKey, choices: tuple[int, ...]) -> None:
        running = self.running.get(key)
        if running is not None:
            for choice in choices or running.choices:
                given = SequenceKey(key.request_id, choice, key.attempt)
                if (handover_id := self.giving.pop(given, None)) is not None:
                    self.network.withdraw(handover_id)
            running.choices -= set(choices or running.choices)
            if not running.choices:
                del self.running[key]

    def _fail(self, key: AttemptKey, error: BatonError) -> None:
        self.running.pop(key, None)
        self._failures.append(
            decode_pb2.SequenceFailure(
                request_id=key.request_id, attempt=key.attempt, error=error_to_proto(error)
            )
        )

    async def _collect(self, running: _Running) -> None:
        await self.collecting.wait()
        try:
            first = await asyncio.shield(self.network.offer(running.handover_id))
        except BatonError as error:
            if running.attempt.key in self.running:
                self._fail(running.attempt.key, error)
            return
        self.network.collected(running.handover_id)
        for entry in first:
            if entry.key.choice in running.choices:
                # A decode worker gives under its own number of the attempt.
                key = entry.key._replace(attempt=running.attempt.attempt)
                running.outputs[key.choice].append(entry._replace(key=key))
        running.ready = True

    def _step(self) -> decode_pb2.StepFrame:
        tokens: list[ChoiceTokens] = []
        for key, running in list(self.running.items()):
            if not running.ready:
                continue
            if not running.told:
                running.told = True
                self._started.append(
                    decode_pb2.SequenceStarted(
                        request_id=key.request_id,
                        attempt=key.attempt,
                        cached_tokens=2,
                        received_bytes=1000 if running.handover_id else 0,
                        prompt_logprobs=scores(running.attempt) if self.scoring else None,
                    )
                )
            for choice in sorted(running.choices):
                if self.stepping.is_set() and choice not in running.leaving:
                    self._advance(running, choice)
                fresh = running.outputs[choice][running.sent[choice] :]
                running.sent[choice] = len(running.outputs[choice])
                tokens += fresh
        failures, self._failures = self._failures, []
        started, self._started = self._started, []
        answers, self._answers = self._answers, []
        return decode_pb2.StepFrame(
            tokens=[choice_tokens_to_proto(entry) for entry in self.tamper(tokens)],
            failures=failures,
            started=started,
            handed_over=answers,
        )

    def _advance(self, running: _Running, choice: int) -> None:
        made = running.outputs[choice]
        if made and made[-1].finish_reason is not None:
            return
        position = running.attempt.position + len(made)
        ahead = position - running.confirmed.get(choice, running.attempt.position)
        if running.max_unconfirmed and ahead >= running.max_unconfirmed:
            return
        self.furthest_ahead = max(self.furthest_ahead, ahead + 1)
        output = [entry.token_ids[0] for entry in made]
        made.append(sample(running.attempt, choice, output))
