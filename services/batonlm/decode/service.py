"""DecodeService, which runs attempts on the engine, with KV collected or computed here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    HandoverFailed,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
)
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.attempt import (
    Attempt,
    AttemptKey,
    ChoiceTokens,
    Logprobs,
    SequenceKey,
)
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerState
from batonlm.core.scheduler.events import Adopted, AttemptFailed, Event, Held, KvComplete, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import CompiledGrammar, KvPayload, ModelRunner
from batonlm.decode.sessions import RouterSession, SequenceLog
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.rpc import metrics, tracing
from batonlm.rpc.convert import prompt_logprobs_to_proto
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import OFF, Span, Tracer, ending, error_type
from batonlm.transfer.receiver import Collected, KvReceiver, TransferRequest, as_handover_failure
from batonlm.transfer.sender import KvSender, PendingTransfer
from batonlm.v1.decode_pb2 import SequenceStarted
from batonlm.worker.service import (
    CACHED,
    DEFAULT_DEADLINE_S,
    HANDOVER_TIMEOUT_S,
    NOTHING_BROUGHT,
    PREFILLED,
    STAGE_TIME,
    AttemptService,
    BroughtPrefix,
)
from batonlm.worker.tiers.prefix_tiers import PrefixTiers

log = logging.getLogger(__name__)

DECODED = metrics.counter(metrics.DECODE_TOKENS)
KV_SOURCE = metrics.counter(metrics.KV_SOURCE)
ORPHANS_TOTAL = metrics.counter(metrics.ORPHANS_TOTAL)
ADOPTIONS_REFUSED = metrics.counter(metrics.ADOPTIONS_REFUSED)

MAX_SESSIONS = 256
RESUME_WINDOW_S = 2.0
"""How long a router's sequences are kept after its stream broke: as long as silence lasts until a
router counts a worker as dead, so that later nobody would resume them."""

ORPHAN_S = 20.0
"""How long a router's sequences are kept after its stream broke for another router, which runs the
same request: clients that lost their router come back within seconds, or not at all."""

MAX_ORPHANS = 256
"""Most sequences that are kept for other routers after the resume window."""

STUCK_S = 30.0
"""The session of a router that reads nothing for so long is dropped."""

SWEEP_S = 0.25
TAKE_BACK_S = 5.0
"""How long a sequence whose KV was not collected is held for its router, which learns from the
other worker that it did not get it, or by that worker's silence."""

ROOM_POLL_S = 0.01
"""The interval between tries to reserve blocks that the steps in flight will free."""


@dataclass(slots=True)
class DecodeAttempt:
    """One attempt on this worker."""

    attempt: Attempt
    session: RouterSession
    source: TransferRequest | None
    """The transfer of its KV; None when the KV is computed here."""
    max_unconfirmed: int
    choices: set[int]
    """The choices that have not ended."""
    span: Span
    """Lasts as long as the attempt."""
    part: Span
    """A child of `span`: first for collecting or computing the KV, then for generating tokens."""
    began: float
    """Seconds of the monotonic clock."""
    received_bytes: int = 0
    """KV bytes that the hand-over transferred."""
    confirmed: dict[SequenceKey, int] = field(default_factory=dict)
    """Positions that were confirmed before the scheduler had the attempt."""
    starting: asyncio.Task[None] | None = None
    """The task that owns the attempt until the scheduler does."""
    migrations: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks that migrate choices to other workers, by choice."""
    packing: int = 0
    """How many copies of its KV run."""
    over: list[tuple[int, ...]] = field(default_factory=list)
    """The arguments of `_free` that wait for these copies."""
    resumes: OutgoingSequence | None = None
    """The sequence with which it goes on, whose KV is here."""
    adopts: SequenceLog | None = None
    """The sequence with which it goes on, whose router is gone."""
    prefix_sender: WorkerIdentity | None = None
    """The worker whose cache has the beginning of its input, if the KV is computed here."""
    brought: BroughtPrefix = NOTHING_BROUGHT
    """What came of that and from tiers, once it is known."""

    @property
    def trace_id(self) -> str:
        return self.span.context.trace_id

    def remaining(self) -> Attempt:
        """The attempt with only the choices that have not ended, and the time that it has left."""
        choices = tuple(c for c in self.attempt.choices if c in self.choices)
        return replace(self.attempt.after(time.monotonic() - self.began), choices=choices)


class OutgoingSequence:
    """A held sequence whose KV is on offer to another decode worker. The task that migrates it owns
    it; its router may take it back while the KV is not collected."""

    def __init__(self, running: DecodeAttempt, key: SequenceKey, offer: PendingTransfer) -> None:
        self.running = running
        self.key = key
        self.offer = offer
        self._claimed_by: DecodeAttempt | None = None
        self._claimed = asyncio.Event()
        self._resumed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def may_be_claimed_by(self, attempt: Attempt, session: RouterSession) -> bool:
        mine = self.running.session is session and attempt.request_id == self.key.request_id
        return mine and attempt.choices == (self.key.choice,) and self._claimed_by is None

    def claim(self, running: DecodeAttempt) -> None:
        """An attempt wants to go on with it: the offer is withdrawn."""
        self._claimed_by = running
        self._claimed.set()
        self.offer.fail(Cancelled("taken back"))

    async def claimed_by(self) -> DecodeAttempt | None:
        """Waits, for a while, for the attempt that wants it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKE_BACK_S):
                await self._claimed.wait()
        return self._claimed_by

    async def resumed(self) -> bool:
        """Waits until it is clear whether it runs on as that attempt."""
        return await asyncio.shield(self._resumed)

    def end(self, *, resumed: bool) -> None:
        """Only the first call counts."""
        if not self._resumed.done():
            self._resumed.set_result(resumed)


class DecodeService(AttemptService[DecodeAttempt]):
    """Runs attempts for routers, and migrates sequences to other decode workers.

    An attempt lasts from `start` until all its choices have ended, failed or were cancelled. A task
    owns it until the scheduler has its input (added, or collected and admitted). Every early end
    frees blocks through the scheduler's `cancel`, after the task has ended, so that nothing is
    reserved or unpacked afterwards.

    A choice that migrates is held until its hand-over has ended: tokens of steps in flight still
    count, and no more steps are launched for it. Then all its KV is offered at once, with its
    newest token, which has no KV yet. It is packed beside the steps of the other sequences. When
    the other worker has collected it, the sequence is freed, as soon as no copy of its KV runs.
    When it has not, because it refused, died or took too long, the router may let the sequence run
    on here as a new attempt, so that nothing is computed again.

    As long as a router's stream is broken, another router may adopt its sequences: an attempt of a
    request that repeats theirs gets all their tokens, and they belong to its session from then on.
    So it may if it says beforehand that it wants them, when its own client has come with them.
    After the resume window the router that is gone has no right to them any more. What can be
    adopted then waits as an orphan, for a while, with a few more tokens at most.
    """

    role = "decode"

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        receiver: KvReceiver,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float = HANDOVER_TIMEOUT_S,
        resume_window_s: float = RESUME_WINDOW_S,
        orphan_s: float = ORPHAN_S,
        tracer: Tracer = OFF,
        tiers: PrefixTiers | None = None,
    ) -> None:
        """resume_window_s: how long a router's sequences are kept for it after its stream broke.
        orphan_s: how long, from then on, for other routers; 0: not at all."""
        super().__init__(
            engine,
            sender,
            receiver,
            grammars,
            handover_timeout_s=handover_timeout_s,
            tracer=tracer,
            tiers=tiers,
        )
        self.sessions: dict[str, RouterSession] = {}
        """By router instance id; kept for resume_window_s after the stream broke."""
        self._orphaned: list[RouterSession] = []
        """Sessions of routers that are gone, with sequences that may be adopted."""
        self._adopting: dict[SequenceKey, SequenceLog] = {}
        """Sequences that have a new router, until the scheduler knows."""
        self._resume_window_s = resume_window_s
        self._orphan_s = orphan_s
        self._holding: dict[SequenceKey, asyncio.Future[Held]] = {}
        self._outgoing: dict[bytes, OutgoingSequence] = {}
        """By hand-over id."""
        self._confirmed: dict[SequenceKey, int] = {}
        self._confirming: asyncio.Task[None] | None = None
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def state(self) -> WorkerState:
        return WorkerState.DRAINING if self._draining else WorkerState.SERVING

    @property
    def orphans(self) -> tuple[bytes, ...]:
        if not self._orphan_s:
            return ()
        return tuple(dict.fromkeys(log.adoption_id for _, log in self._adoptable()))

    @property
    def num_orphans(self) -> int:
        """Sequences that are kept after the resume window, with ended ones."""
        return sum(len(session.keys) for session in self._orphaned)

    def session(self, router_instance_id: str) -> RouterSession:
        """The router's session: the existing one, or a new one.

        Raises Overloaded when there are MAX_SESSIONS.
        """
        session = self.sessions.get(router_instance_id)
        if session is None:
            if len(self.sessions) >= MAX_SESSIONS:
                raise Overloaded("too many routers are connected to this decode worker")
            session = self.sessions[router_instance_id] = RouterSession(router_instance_id)
        return session

    def start(
        self,
        session: RouterSession,
        attempt: Attempt,
        source: TransferRequest | None,
        max_unconfirmed: int,
        held_handover_id: bytes = b"",
        prefix_sender: WorkerIdentity | None = None,
        adoption_ids: Sequence[bytes] = (),
        logprobs: Sequence[Logprobs] = (),
        *,
        adopts: bool = False,
    ) -> None:
        """Begins an attempt. source: None to prefill the input here, behind what comes from
        prefix_sender's cache. held_handover_id: to go on with the sequence that is on offer under
        it, also while draining. adoption_ids: of each choice, by which other routers may go on with
        it; none: none may. logprobs: of the output tokens in its input. adopts: to go on with the
        sequence that has this id, also while draining; where that has not begun, its tokens are
        sent, and the attempt fails. Repeating it has no effect.

        Errors are reported in the session's frames, never raised.
        """
        known = self.attempts.get(attempt.key)
        if known is not None and known.session is session:
            return
        resumes = self._outgoing.get(held_handover_id)
        adopted = self._find_orphan(adoption_ids[0]) if adopts else None
        if adopts:
            refusal = self._refusal_to_adopt(adopted, attempt)
        elif held_handover_id:
            refusal = self._refusal_to_resume(resumes, attempt, session)
        else:
            refusal = self._refusal(attempt.key)
        if refusal is not None:
            session.failed(attempt.key, attempt.choices, refusal)
            return
        if adopted is not None and not adopted[1].begun:
            self._take_tokens(*adopted, attempt, session)
            return
        span = self._tracer.go_on(tracing.DECODE_RUN, parent=TraceContext(attempt.traceparent))
        computes = source is None and resumes is None and not adopts
        part = span.child(tracing.DECODE_PREFILL if computes else tracing.COLLECT)
        choices, began = set(attempt.choices), time.monotonic()
        running = self.attempts[attempt.key] = DecodeAttempt(
            attempt, session, source, max_unconfirmed, choices, span, part, began, resumes=resumes
        )
        running.prefix_sender = prefix_sender if computes else None
        if resumes is not None:
            resumes.claim(running)
        if adopted is not None:
            running.adopts = self._take_orphan(*adopted)
        self._meter.began(session.router_instance_id, attempt)
        session.open(attempt, adoption_ids, logprobs)
        running.starting = self._spawn(self._start(running))

    def cancel(self, session: RouterSession, key: AttemptKey, choices: Collection[int]) -> None:
        """Ends choices of an attempt; an empty `choices` means all. Unknown choices, and those of
        other sessions, are not an error."""
        running = self.attempts.get(key)
        if running is None or running.session is not session:
            return
        ended = running.choices.intersection(choices) if choices else set(running.choices)
        for choice in ended:
            session.forget(SequenceKey(key.request_id, choice, key.attempt))
        self._remove(running, ended)
        if not running.choices:
            self._end(running, Cancelled("cancelled"))
        elif ended:
            self._free(running, *ended)

    def want(self, adoption_ids: Collection[bytes]) -> None:
        """A client has come to a router with these sequences: they are reported as orphans, even
        where their router is connected. It may hang, be cut off or leave."""
        for session in [*self.sessions.values(), *self._orphaned]:
            session.want(adoption_ids)

    def hand_over(
        self,
        session: RouterSession,
        key: SequenceKey,
        handover_id: bytes,
        receiver_instance_id: str,
    ) -> None:
        """Migrates a running sequence to another decode worker, with its KV; or reports to the
        session that it stays. Repeating the request during the migration has no effect.
        """
        running = self.attempts.get(AttemptKey(key.request_id, key.attempt))
        if (
            running is None
            or running.session is not session
            or len(handover_id) != HANDOVER_ID_BYTES
            or running.starting is not None
            or key.choice not in running.choices
        ):
            session.migrated_out(key, handover_id, None)
        elif key.choice not in running.migrations:
            running.migrations[key.choice] = self._spawn(
                self._migrate_out(running, key, handover_id, receiver_instance_id)
            )

    def confirm(self, session: RouterSession, positions: Mapping[SequenceKey, int]) -> None:
        """Confirms that output positions below these contain no stop string. Unknown sequences are
        not an error."""
        for key, position in positions.items():
            running = self.attempts.get(AttemptKey(key.request_id, key.attempt))
            if running is None or running.session is not session:
                continue
            if running.starting is None:
                self._confirm({key: position})
            else:
                # Token 0 came from prefill, and the scheduler does not have it yet.
                running.confirmed[key] = position

    def resume(
        self, session: RouterSession, positions: Mapping[SequenceKey, int]
    ) -> list[SequenceKey]:
        """Continues a router's sequences on a new stream from its positions; returns the sequences
        that are no longer here."""
        lost, dropped = session.resume(positions)
        for key in dropped:
            self.cancel(session, AttemptKey(key.request_id, key.attempt), (key.choice,))
        return lost

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NewTokens(tokens):
                    DECODED.inc(sum(len(t.token_ids) for t in tokens))
                    for choice_tokens in tokens:
                        self._take(choice_tokens)
                case Adopted(tokens):
                    key = AttemptKey(tokens.key.request_id, tokens.key.attempt)
                    if (running := self.attempts.get(key)) is not None:
                        running.session.tokens(tokens)
                case KvComplete(key):
                    if (running := self.attempts.get(key)) is not None:
                        self._kv_complete(running, event)
                case Held(key):
                    waiting = self._holding.get(key)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(event)
                case AttemptFailed(key, choices, error):
                    self._failed(key, choices, error)
                case _:
                    pass

    async def close(self) -> None:
        self._draining = True
        for session in [*self.sessions.values(), *self._orphaned]:
            self._drop(session, Unavailable("this decode worker is leaving"))
        self._sweeping.cancel()
        await asyncio.wait({self._sweeping, *self._tasks})
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.wait([self._confirming])
        await self._prefixes.close()
        await self._sender.close()
        await self._receiver.close()
        if self._tiers is not None:
            await self._tiers.close()

    def _in_use(self) -> Iterable[tuple[str, Attempt]]:
        # Whoever comes for an orphan counts as its request.
        running = [one for one in self.attempts.values() if not one.session.orphaned]
        return ((one.session.router_instance_id, one.attempt) for one in running)

    def _is_empty(self) -> bool:
        return not self.attempts and not any(s.has_news for s in self.sessions.values())

    def _refusal_to_resume(
        self, outgoing: OutgoingSequence | None, attempt: Attempt, session: RouterSession
    ) -> BatonError | None:
        if outgoing is None or not outgoing.may_be_claimed_by(attempt, session):
            return HandoverFailed("this worker does not hold that sequence (any more)")
        if attempt.key in self.attempts:
            return InvalidArgument("this attempt already runs here", field="attempt")
        return None

    def _adoptable(self) -> Iterable[tuple[RouterSession, SequenceLog]]:
        """Yields the sequences whose routers are gone now, maybe for good, and those that another
        router wants."""
        for session in (*self._orphaned, *self.sessions.values()):
            for log in session.adoptable():
                yield session, log

    def _find_orphan(self, adoption_id: bytes) -> tuple[RouterSession, SequenceLog] | None:
        """Returns the sequence with this id; of several, whose runs began one after the other, the
        one that has come farthest."""
        found = [pair for pair in self._adoptable() if pair[1].adoption_id == adoption_id]
        return max(found, key=lambda pair: pair[1].end, default=None)

    def _refusal_to_adopt(
        self, orphan: tuple[RouterSession, SequenceLog] | None, attempt: Attempt
    ) -> BatonError | None:
        if attempt.key in self.attempts:
            return InvalidArgument("this attempt already runs here", field="attempt")
        if orphan is None:
            ADOPTIONS_REFUSED.labels("gone").inc()
            return HandoverFailed("this worker does not have that sequence (any more)")
        _, log = orphan
        if attempt.choices != (log.key.choice,) or not attempt.repeats(log.attempt):
            ADOPTIONS_REFUSED.labels("differs").inc()
            return HandoverFailed("that sequence is of another request")
        return None

    def _take_orphan(self, session: RouterSession, log: SequenceLog) -> SequenceLog:
        """Takes a sequence from its router. Until the scheduler has renamed it, the adopting
        attempt owns it under its old key, too (`_end`)."""
        ORPHANS_TOTAL.labels("adopted").inc()
        self._taken(session, log)
        self._adopting[log.key] = log
        former = self.attempts.get(log.attempt.key)
        if former is not None:
            self._remove(former, {log.key.choice})
            if not former.choices:
                self._forget(former)
        return log

    def _take_tokens(
        self, session: RouterSession, log: SequenceLog, attempt: Attempt, to: RouterSession
    ) -> None:
        """Sends the tokens of a sequence that has not begun here: the KV that it waits for is
        another attempt's, which ends."""
        ORPHANS_TOTAL.labels("adopted").inc()
        (key,) = attempt.keys()
        to.left(log.whole(key), HandoverFailed("that sequence has not begun here"))
        self.cancel(session, log.attempt.key, (log.key.choice,))
        self._taken(session, log)

    def _taken(self, session: RouterSession, log: SequenceLog) -> None:
        """A router that is connected learns that the sequence is not its own any more; another one
        would when it comes back."""
        session.forget(log.key)
        if session.stream is not None:
            error = HandoverFailed("another router goes on with this sequence")
            session.failed(log.attempt.key, (log.key.choice,), error, adopted=True)

    async def _adopt(self, running: DecodeAttempt, log: SequenceLog) -> None:
        """Has a sequence run on as this attempt. Raises HandoverFailed."""
        (key,) = running.attempt.keys()
        try:
            if log.finish_reason is None:
                adopt, earlier = running.attempt, log.earlier
                await self._engine.call(lambda loop: loop.scheduler.adopt(log.key, adopt, earlier))
                return
        except NotFound:
            # Its last tokens came while the scheduler was asked; or else it is held.
            if log.finish_reason is None:
                ADOPTIONS_REFUSED.labels("gone").inc()
                raise HandoverFailed("that sequence is not here any more") from None
        finally:
            self._adopting.pop(log.key, None)
        complete = KvComplete(running.attempt.key, running.attempt.num_prompt_tokens, 0.0)
        self._kv_complete(running, complete)
        running.session.tokens(log.whole(key))
        self._ended(running, key.choice)

    def _leave_orphans(self, session: RouterSession) -> None:
        """A router has not come back in time: keeps what others may adopt, and drops the rest."""
        del self.sessions[session.router_instance_id]
        session.cut()
        found = session.adoptable() if self._orphan_s and not self._draining else []
        begun = [log.key for log in found if log.begun]
        kept = begun[: MAX_ORPHANS - self.num_orphans]
        for running in [r for r in self.attempts.values() if r.session is session]:
            dropped = {key.choice for key in running.attempt.keys() if key not in kept}  # noqa: SIM118
            if dropped := dropped & running.choices:
                self.cancel(session, running.attempt.key, dropped)
        for key in [key for key in session.keys if key not in kept]:
            session.forget(key)
        if kept:
            session.orphaned = True
            self._orphaned.append(session)
            ORPHANS_TOTAL.labels("kept").inc(len(kept))
            self._post(lambda loop: loop.scheduler.orphan(kept))

    def _drop_orphans(self, now: float) -> None:
        """Drops what nobody has adopted in time; when this worker drains, at once."""
        for session in [*self._orphaned]:
            assert session.broken_at is not None
            if self._draining or session.broken_at < now - self._resume_window_s - self._orphan_s:
                ORPHANS_TOTAL.labels("expired").inc(len(session.keys))
                self._drop(session, Cancelled("no router came for it"))
            elif not session.keys:
                self._orphaned.remove(session)

    async def _start(self, running: DecodeAttempt) -> None:
        """Hands an attempt's input to the scheduler, with KV that is here, collected or to be
        computed.

        If the attempt ends early, its reserved blocks are freed after this task has ended.
        """
        key = running.attempt.key
        try:
            if running.resumes is not None:
                # The scheduler has its grammar.
                if not await running.resumes.resumed():
                    raise HandoverFailed("the KV of this attempt is not here any more")
                grammar = None
            elif running.adopts is not None:
                await self._adopt(running, running.adopts)
                grammar = None
            else:
                grammar = await self._grammars.compiled(running.attempt.grammar)
            computes = (running.resumes or running.source or running.adopts) is None
            if computes:
                running.brought = await self._bring_prefix(
                    running.attempt, running.prefix_sender, running.trace_id
                )
                attempt, limit = running.remaining(), running.max_unconfirmed
                await self._engine.call(
                    lambda loop: loop.scheduler.add(
                        attempt, time.monotonic(), max_unconfirmed=limit, grammar=grammar
                    )
                )
            elif running.source is not None:
                collected = await self._collect(running, running.source, grammar)
                running.received_bytes = collected.received_bytes
                try:
                    await self._engine.call(
                        lambda loop: loop.scheduler.admit(key, collected.tokens, time.monotonic())
                    )
                except InvalidArgument:
                    # The sender is at fault, not the client.
                    raise HandoverFailed("the tokens that came with the KV do not fit") from None
            running.starting = None
            self._confirm(running.confirmed)
        except BatonError as error:
            self._failed(key, (), error)
        except Exception:
            about = named(key.request_id, running.trace_id)
            log.exception("an attempt could not be started", extra=about)
            self._failed(key, (), Internal("the decode worker could not start this attempt"))

    async def _collect(
        self, running: DecodeAttempt, source: TransferRequest, grammar: CompiledGrammar | None
    ) -> Collected:
        """Collects the KV. Raises HandoverFailed after the timeout, and what `KvReceiver.collect`
        raises."""
        key = running.attempt.key
        extents: Extents = ()

        async def reserve() -> int | None:
            nonlocal extents
            # A later cancel of a choice reaches the scheduler after this call.
            attempt, limit = running.remaining(), running.max_unconfirmed

            def take(loop: EngineLoop) -> tuple[int | None, Extents, bool]:
                scheduler, now = loop.scheduler, time.monotonic()
                position = scheduler.reserve(attempt, now, max_unconfirmed=limit, grammar=grammar)
                place = () if position is None else scheduler.extents(key)
                return position, place, scheduler.making_room(key, now)

            while True:
                position, extents, soon = await self._engine.call(take)
                if position is not None or not soon:
                    return position
                await asyncio.sleep(ROOM_POLL_S)

        async def unpack(first_position: int, count: int, payload: KvPayload) -> None:
            # The reserved blocks do not move, and belong to this attempt until the receiver ends.
            size = len(running.attempt.token_ids)

            def copy(runner: ModelRunner) -> None:
                place = runner.layout.place(first_position, size, runner.block_size)
                runner.unpack(extents, place, count, payload)

            await self._engine.copy(copy)

        deadline_s = running.attempt.remaining_s or DEFAULT_DEADLINE_S
        timeout_s = min(deadline_s, self._handover_timeout_s)
        try:
            # The transfer's own deadline does not include the handshake with the sender.
            async with asyncio.timeout(timeout_s):
                return await self._receiver.collect(
                    replace(source, deadline_s=timeout_s), reserve, unpack
                )
        except TimeoutError:
            raise HandoverFailed("the hand-over took too long") from None

    async def _migrate_out(
        self, running: DecodeAttempt, key: SequenceKey, handover_id: bytes, receiver: str
    ) -> None:
        """Owns a choice from the request to migrate it until another worker has its KV, it runs on
        here, or nobody wants it any more."""
        session, whole = running.session, AttemptKey(key.request_id, key.attempt)
        error: BatonError | None = None
        try:
            held = await self._hold(key)
            offer = self._offer(running, held, handover_id, receiver) if held is not None else None
            if held is None or offer is None:
                if held is not None:
                    await self._engine.call(lambda loop: loop.scheduler.resume(key))
                del running.migrations[key.choice]
                session.migrated_out(key, handover_id, None)
                return
            outgoing = self._outgoing[handover_id] = OutgoingSequence(running, key, offer)
            try:
                session.migrated_out(key, handover_id, held.newest.position + 1)
                error = await self._give(outgoing)
                if error is not None and await self._resume(outgoing):
                    error = None
            finally:
                offer.fail(Cancelled("cancelled"))
                del self._outgoing[handover_id]
                outgoing.end(resumed=False)
        except BatonError as raised:
            error = raised
        except Exception:
            about = named(key.request_id, running.trace_id)
            log.exception("a sequence could not be handed over", extra=about)
            error = Internal("the decode worker could not hand over")
        self._free(running, key.choice)
        if error is not None:
            self._failed(whole, (key.choice,), error)
        else:
            session.forget(key)
            self._remove(running, {key.choice})
            if not running.choices:
                self._forget(running)
        self._note_drained()

    async def _hold(self, key: SequenceKey) -> Held | None:
        """Holds a sequence; returns None when it cannot be held now, and continues.

        A token of a step in flight may end the sequence: then this waits until it is cancelled.
        """
        waiting: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._holding[key] = waiting
        try:
            if not await self._engine.call(lambda loop: loop.scheduler.hold(key)):
                return None
            return await waiting
        finally:
            del self._holding[key]

    def _offer(
        self, running: DecodeAttempt, held: Held, handover_id: bytes, receiver: str
    ) -> PendingTransfer | None:
        """Puts a held sequence's KV on offer; None: it cannot be now."""
        choice = held.key.choice

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            if choice not in running.choices:
                raise Cancelled("cancelled")

            def copy(runner: ModelRunner) -> None:
                place = runner.layout.place(first_position, held.num_positions, runner.block_size)
                runner.pack(held.extents, place, count, out)

            running.packing += 1
            try:
                await self._engine.copy(copy)
            finally:
                running.packing -= 1
                if not running.packing:
                    over, running.over = running.over, []
                    for choices in over:
                        self._free(running, *choices)

        try:
            offer = self._sender.offer(
                handover_id,
                receiver_instance_id=receiver,
                num_positions=held.num_positions,
                pack=pack,
                deadline_s=self._handover_timeout_s,
                about=named(held.key.request_id, running.trace_id),
            )
        except (InvalidArgument, Overloaded) as error:
            log.warning("a sequence is not handed over: %s", error.message)
            return None
        offer.announce()
        offer.advance(held.num_positions)
        offer.tokens((held.newest,))
        return offer

    async def _give(self, outgoing: OutgoingSequence) -> BatonError | None:
        """Returns when the receiver has collected the KV, or the error for which it has not."""
        with ending(outgoing.running.span.child(tracing.GIVE)) as span:
            outcome = await outgoing.offer.wait()
            span.end(error_type(outcome.error))
        # A timeout or refusal of the hand-over is not one of the request.
        return None if outcome.error is None else as_handover_failure(outcome.error)

    async def _resume(self, outgoing: OutgoingSequence) -> bool:
        """Lets a sequence whose KV was not collected run on as the attempt that wants it. Returns
        False when none does."""
        running = await outgoing.claimed_by()
        if running is None or self.attempts.get(running.attempt.key) is not running:
            return False
        # If that attempt ends meanwhile, its blocks are freed after this.
        await self._engine.call(lambda loop: loop.scheduler.resume(outgoing.key, running.attempt))
        outgoing.end(resumed=True)
        return True

    def _confirm(self, positions: Mapping[SequenceKey, int]) -> None:
        """Passes positions on to the engine. One call runs at a time; positions that arrive
        meanwhile go into the next one, so that frequent confirms do not fill the engine's queue."""
        self._confirmed.update(positions)
        if self._confirmed and (self._confirming is None or self._confirming.done()):
            self._confirming = asyncio.create_task(self._pass_on_confirmed())

    async def _pass_on_confirmed(self) -> None:
        def confirm(loop: EngineLoop) -> None:
            for key, position in positions.items():
                loop.scheduler.confirm(key, position)

        # A stopped engine runs no sequence that waits for this.
        with suppress(Unavailable):
            while self._confirmed:
                positions, self._confirmed = self._confirmed, {}
                await self._engine.call(confirm)

    async def _sweep(self) -> None:
        """Drops the sessions of routers that are gone or read nothing. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            window = now - self._resume_window_s
            for session in list(self.sessions.values()):
                session.forget_ended(window)
                if session.broken_at is not None and session.broken_at < window:
                    self._leave_orphans(session)
                elif session.busy_since is not None and session.busy_since < now - STUCK_S:
                    log.warning("a router reads nothing: its session is dropped")
                    self._drop(session, Cancelled("the router reads nothing"))
            self._drop_orphans(now)
            self._note_drained()

    def _take(self, tokens: ChoiceTokens) -> None:
        running = self.attempts.get(AttemptKey(tokens.key.request_id, tokens.key.attempt))
        if running is None or tokens.key.choice not in running.choices:
            if (log := self._adopting.get(tokens.key)) is not None:
                log.append(tokens)
            return
        session = running.session
        session.tokens(tokens)
        self._meter.made(session.router_instance_id, running.attempt, len(tokens.token_ids))
        if tokens.finish_reason is not None:
            self._ended(running, tokens.key.choice)

    def _ended(self, running: DecodeAttempt, choice: int) -> None:
        self._remove(running, {choice})
        if not running.choices:
            self._forget(running)

    def _kv_complete(self, running: DecodeAttempt, event: KvComplete) -> None:
        cached, received = event.cached_tokens, running.received_bytes
        wait_s = time.monotonic() - running.began
        if running.adopts is not None:
            source, stage = "adopted", "kv_wait"
        elif running.resumes is not None:
            source, stage = "cache", "kv_wait"
        elif running.source is None:
            source, stage = "local", "local_prefill"
            CACHED.inc(cached)
            PREFILLED.inc(len(running.attempt.token_ids) - cached)
        else:
            moved = "moved" if running.source.sender.role == "decode" else "handover"
            source, stage = moved if received else "cache", "kv_wait"
        KV_SOURCE.labels(source).inc()
        STAGE_TIME.labels(stage).observe(wait_s)
        if running.span.recording:
            running.part.set_attributes(
                {tracing.WORKER_CACHED_TOKENS: cached, tracing.KV_BYTES: received}
            )
            running.part.end()
            running.part = running.span.child(tracing.GENERATE)
        running.session.started(
            SequenceStarted(
                request_id=event.key.request_id,
                attempt=event.key.attempt,
                cached_tokens=cached,
                received_bytes=received,
                wait_us=round(wait_s * 1e6),
                prompt_logprobs=prompt_logprobs_to_proto(event.prompt_logprobs),
                prefix=running.brought.collected,
                restored=running.brought.restored,
            )
        )

    def _failed(self, key: AttemptKey, choices: Iterable[int], error: BatonError) -> None:
        """Ends choices with an error; an empty `choices` means all."""
        running = self.attempts.get(key)
        if running is None:
            return
        ended = running.choices.intersection(tuple(choices) or running.choices)
        if not ended:
            return
        self._remove(running, ended)
        if running.session.orphaned:
            ORPHANS_TOTAL.labels("dropped").inc(len(ended))
        running.session.failed(key, sorted(ended), error)
        if not running.choices:
            self._end(running, error)

    def _forget(self, running: DecodeAttempt, error: BatonError | None = None) -> None:
        del self.attempts[running.attempt.key]
        running.part.end(error_type(error))
        running.span.end(error_type(error))

    def _end(self, running: DecodeAttempt, error: BatonError) -> None:
        """Ends an attempt early: first its task, then its blocks."""
        self._forget(running, error)
        task, running.starting = running.starting, None

        def free(_: object = None) -> None:
            self._free(running)
            if (log := running.adopts) is not None:
                self._adopting.pop(log.key, None)
                former, choice = log.attempt.key, log.key.choice
                self._post(lambda loop: loop.scheduler.cancel(former, (choice,)))

        if task is None or task is asyncio.current_task():
            free()
        else:
            task.cancel()
            task.add_done_callback(free)

    def _remove(self, running: DecodeAttempt, choices: Collection[int]) -> None:
        """Removes choices from an attempt, and cancels their migrations."""
        running.choices.difference_update(choices)
        for choice in choices:
            task = running.migrations.pop(choice, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _free(self, running: DecodeAttempt, *choices: int) -> None:
        """Frees what the engine holds for these choices, without any for all, once none of the
        attempt's KV is being copied."""
        if running.packing:
            running.over.append(choices)
            return
        self._post(lambda loop: loop.scheduler.cancel(running.attempt.key, choices))

    def _drop(self, session: RouterSession, error: BatonError) -> None:
        """Ends a router's attempts with an error, and removes its session."""
        if session.orphaned:
            session.orphaned = False
            self._orphaned.remove(session)
        else:
            del self.sessions[session.router_instance_id]
        for running in [r for r in self.attempts.values() if r.session is session]:
            self._failed(running.attempt.key, (), error)
        session.cut()
