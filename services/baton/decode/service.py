"""Runs attempts on the engine, with KV collected or computed here.

An attempt lives from `start` until all its choices ended, failed or were cancelled. Until its input
is with the scheduler for good (added, or collected and admitted) a task owns it; afterwards the
scheduler does. Blocks are given back by the scheduler's `cancel`, which every early end goes
through: the task is ended first, so that nothing is reserved or unpacked after it. A choice that is
given to another worker stays, held and silent, until its hand-over has ended.

What the engine tells about an attempt, or a choice, that ended here meanwhile is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

from baton.core.admission.tenant_budgets import UseMeter
from baton.core.errors import (
    BatonError,
    Cancelled,
    HandoverFailed,
    Internal,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from baton.core.handover.messages import HANDOVER_ID_BYTES
from baton.core.kvcache.block_pool import Extents
from baton.core.observe.stages import TraceContext
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from baton.core.routing.load import TenantUse, WorkerState
from baton.core.scheduler.events import AttemptFailed, Event, Held, KvComplete, NewTokens
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import CompiledGrammar
from baton.decode.sessions import Failure, MigratedOut, RouterSession, Started
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.rpc import metrics
from baton.rpc import trace_names as names
from baton.rpc.logs import named
from baton.rpc.tracing import OFF, Span, Tracer, ending, error_type
from baton.transfer.peers import as_handover_failure
from baton.transfer.receiver import Collected, KvReceiver, TransferRequest
from baton.transfer.sender import KvSender
from baton.transfer.stream import Names

# What the trace of a request tells of one attempt at a decode worker.
#
# Its KV is collected, or computed here, and then its tokens are made: two spans that follow each
# other, below one that lasts as long as the attempt is here. Nothing is recorded once per token.


class AttemptTrace:
    """collects: its KV is another worker's. Every method returns at once."""

    def __init__(self, tracer: Tracer, attempt: Attempt, *, collects: bool) -> None:
        self._span = tracer.go_on(names.DECODE_RUN, parent=TraceContext(attempt.traceparent))
        self._part = self._span.child(names.COLLECT if collects else names.DECODE_PREFILL)

    @property
    def trace_id(self) -> str:
        return self._span.context.trace_id

    def kv_ready(self, cached_tokens: int, received_bytes: int) -> None:
        if not self._span.recording:
            return
        self._part.tell({names.WORKER_CACHED_TOKENS: cached_tokens, names.KV_BYTES: received_bytes})
        self._part.end()
        self._part = self._span.child(names.GENERATE)

    def giving(self) -> AbstractContextManager[Span]:
        """While one of its sequences is on offer to another worker."""
        return ending(self._span.child(names.GIVE))

    def gone(self, error: BaseException | None) -> None:
        """It is here no more."""
        self._part.end(error_type(error))
        self._span.end(error_type(error))


# Brings one attempt's input to the scheduler, with KV collected or to be computed here.
#
# Whatever it has reserved when it ends early, the caller frees, with the scheduler's `cancel` after
# this has ended.


DEFAULT_DEADLINE_S = 600.0

ROOM_POLL_S = 0.01
"""Between two looks at room that comes free with the steps in flight."""


@dataclass(slots=True)
class Running:
    """One attempt on this worker. choices: those that have not ended. began: monotonic clock.

    ticket: where its KV comes from, None when it is computed here. received_bytes: KV that the
    hand-over brought. confirmed: positions that were confirmed before it ran. beginning: the task
    that owns it until the scheduler does. outgoing_migrations: tasks that give choices away, by
    choice.
    """

    attempt: Attempt
    session: RouterSession
    ticket: TransferRequest | None
    max_unconfirmed: int
    choices: set[int]
    began: float
    trace: AttemptTrace
    received_bytes: int = 0
    confirmed: dict[SequenceKey, int] = field(default_factory=dict)
    beginning: asyncio.Task[None] | None = None
    outgoing_migrations: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def asked(self) -> tuple[str, Attempt]:
        """The router that asked for it, by instance id, and what for."""
        return self.session.router_instance_id, self.attempt

    def may_leave(self, choice: int) -> bool:
        """Whether it runs here and could be given to another worker."""
        return self.beginning is None and choice in self.choices

    def wanted(self) -> Attempt:
        """The attempt with the choices that were not cancelled meanwhile."""
        choices = tuple(c for c in self.attempt.choices if c in self.choices)
        return replace(self.attempt, choices=choices)


class Beginner:
    """Begins attempts on one engine. handover_timeout_s: for a whole hand-over, the prompt's
    queueing and computing included.
    """

    def __init__(
        self,
        engine: EngineThread,
        receiver: KvReceiver,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._grammars = grammars
        self._handover_timeout_s = handover_timeout_s

    @property
    def holdings(self) -> dict[str, int]:
        return self._receiver.holdings

    @property
    def probing(self) -> bool:
        return self._receiver.probing

    async def begin(self, running: Running) -> None:
        """Returns when the scheduler has the attempt for good. Raises BatonError."""
        key = running.attempt.key
        grammar = await self._grammars.compiled(running.attempt.grammar)
        if running.ticket is None:
            await self._add(running, grammar)
            return
        collected = await self._collect(running, running.ticket, grammar)
        running.received_bytes = collected.received_bytes
        await self._engine.call(
            lambda loop: loop.scheduler.admit(key, collected.tokens, time.monotonic())
        )

    async def _add(self, running: Running, grammar: CompiledGrammar | None) -> None:
        attempt, max_unconfirmed = running.wanted(), running.max_unconfirmed
        await self._engine.call(
            lambda loop: loop.scheduler.add(
                attempt, time.monotonic(), max_unconfirmed=max_unconfirmed, grammar=grammar
            )
        )

    async def _collect(
        self, running: Running, ticket: TransferRequest, grammar: CompiledGrammar | None
    ) -> Collected:
        """Raises HandoverFailed when it takes too long, and what `KvReceiver.collect` raises."""
        key = running.attempt.key
        extents: Extents = ()

        async def reserve() -> int | None:
            nonlocal extents
            # A choice that is cancelled later reaches the scheduler after this.
            attempt, max_unconfirmed = running.wanted(), running.max_unconfirmed

            def ask(loop: EngineLoop) -> tuple[int | None, Extents, bool]:
                scheduler, now = loop.scheduler, time.monotonic()
                position = scheduler.reserve(
                    attempt, now, max_unconfirmed=max_unconfirmed, grammar=grammar
                )
                place = () if position is None else scheduler.extents(key)
                return position, place, scheduler.making_room(key, now)

            while True:
                position, extents, soon = await self._engine.call(ask)
                if position is not None or not soon:
                    return position
                await asyncio.sleep(ROOM_POLL_S)

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            # What is reserved stays in its place, and ours, until the receiver is done.
            await self._engine.copy(
                lambda runner: runner.unpack(extents, first_position, count, payload)
            )

        remaining_s = running.attempt.remaining_s or DEFAULT_DEADLINE_S
        timeout_s = min(remaining_s, self._handover_timeout_s)
        try:
            # The ticket's own deadline does not cover meeting the sender.
            async with asyncio.timeout(timeout_s):
                return await self._receiver.collect(
                    replace(ticket, deadline_s=timeout_s), reserve, unpack
                )
        except TimeoutError:
            raise HandoverFailed("the hand-over took too long") from None

    async def close(self) -> None:
        """Parts from all senders. What begins was ended before."""
        await self._receiver.close()


# Stops running sequences and gives their KV to other decode workers.
#
# The engine holds a sequence: what it launched for it still counts, nothing more is launched. Then
# all its KV goes on offer at once, with its newest token, which has no KV yet. However that ends,
# the caller frees the sequence with the scheduler's `cancel`: packing that is queued comes before
# that, and later packing finds nothing to pack.


class OutgoingMigrations:
    """Lives on the event loop. handover_timeout_s: for a whole hand-over."""

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        *,
        handover_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._handover_timeout_s = handover_timeout_s
        self._waiting: dict[SequenceKey, asyncio.Future[Held]] = {}

    @property
    def holdings(self) -> dict[str, int]:
        return self._sender.holdings

    @property
    def probing(self) -> bool:
        return self._sender.probing

    async def hold(self, key: SequenceKey) -> Held | None:
        """Stops a sequence; None when it cannot be held now, and goes on.

        A token that is still awaited may end the sequence: then this waits until it is cancelled.
        """
        waiting: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            if not await self._engine.call(lambda loop: loop.scheduler.hold(key)):
                return None
            return await waiting
        finally:
            del self._waiting[key]

    def held(self, event: Held) -> None:
        """The engine tells that a sequence has stopped."""
        waiting = self._waiting.get(event.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    async def give(
        self,
        held: Held,
        handover_id: bytes,
        receiver_instance_id: str,
        offered: Callable[[], None],
        about: Names,
    ) -> None:
        """Offers the KV, says so, and returns when it was collected.

        Raises HandoverFailed when it was not, and what `KvSender.offer` raises. Cancelled, it takes
        the offer back.
        """
        key = held.key

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            await self._engine.call_to_end(
                lambda loop: loop.runner.pack(
                    loop.scheduler.held_extents(key), first_position, count, out
                )
            )

        offer = self._sender.offer(
            handover_id,
            receiver_instance_id=receiver_instance_id,
            num_positions=held.num_positions,
            pack=pack,
            deadline_s=self._handover_timeout_s,
            about=about,
        )
        try:
            offer.announce()
            offer.advance(held.num_positions)
            offer.tokens((held.newest,))
            offered()
            outcome = await offer.wait()
        finally:
            offer.fail(Cancelled("cancelled"))
        if outcome.error is not None:
            # Out of time or refused: the hand-over is, not the request.
            raise as_handover_failure(outcome.error)

    async def close(self) -> None:
        """Ends what is still on offer."""
        await self._sender.close()


# What a decode worker counts of its attempts.

DECODED = metrics.counter(metrics.DECODE_TOKENS)
PREFILLED = metrics.counter(metrics.PREFILL_TOKENS)
CACHED = metrics.counter(metrics.CACHED_TOKENS)
KV_SOURCE = metrics.counter(metrics.KV_SOURCE)
STAGE_TIME = metrics.histogram(metrics.STAGE_TIME)


def count_kv(running: Running, cached_tokens: int, wait_s: float) -> None:
    """An attempt's KV is complete, so long after it began."""
    if running.ticket is None:
        source, stage = "local", "local_prefill"
        CACHED.inc(cached_tokens)
        PREFILLED.inc(len(running.attempt.token_ids) - cached_tokens)
    else:
        given = "moved" if running.ticket.sender.role == "decode" else "handover"
        source, stage = given if running.received_bytes else "cache", "kv_wait"
    KV_SOURCE.labels(source).inc()
    STAGE_TIME.labels(stage).observe(wait_s)


# Passes on to the engine which positions hold no stop string.
#
# One call is under way at a time and carries all that came meanwhile, so that however often routers
# confirm, the engine's queue is not filled by it.


class Confirmations:
    """Lives on the event loop."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._waiting: dict[SequenceKey, int] = {}
        self._telling: asyncio.Task[None] | None = None

    def add(self, positions: Mapping[SequenceKey, int]) -> None:
        """Positions below these are confirmed."""
        self._waiting.update(positions)
        if self._waiting and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Tells nothing more and returns when no task of ours runs."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    async def _tell(self) -> None:
        # An engine that has stopped runs no sequence that could wait for this.
        with suppress(Unavailable):
            while self._waiting:
                await self._engine.call(self._confirm(self._waiting))

    def _confirm(self, positions: Mapping[SequenceKey, int]) -> Callable[[EngineLoop], None]:
        self._waiting = {}

        def confirm(loop: EngineLoop) -> None:
            for key, position in positions.items():
                loop.scheduler.confirm(key, position)

        return confirm


log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4096
MAX_SESSIONS = 256
STUCK_S = 30.0
"""A router that takes nothing of what waits for it for so long is cut."""

SWEEP_S = 0.25


class DecodeService:
    """Decode's business between the wire and the engine thread. Lives on the event loop.

    resume_window_s: how long a router's sequences outlive its stream.
    """

    def __init__(
        self,
        engine: EngineThread,
        beginner: Beginner,
        outgoing_migrations: OutgoingMigrations,
        *,
        resume_window_s: float,
        tracer: Tracer = OFF,
    ) -> None:
        self._engine = engine
        self._beginner = beginner
        self._outgoing_migrations = outgoing_migrations
        self._resume_window_s = resume_window_s
        self._tracer = tracer
        self._running: dict[AttemptKey, Running] = {}
        self._sessions: dict[str, RouterSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._confirmations = Confirmations(engine)
        self._meter = UseMeter()
        self._draining = False
        self._quiet = asyncio.Event()
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def state(self) -> WorkerState:
        return WorkerState.DRAINING if self._draining else WorkerState.SERVING

    @property
    def num_attempts(self) -> int:
        return len(self._running)

    @property
    def holdings(self) -> dict[str, int]:
        """What is held here for attempts besides blocks and buffers, by kind."""
        return {
            **self._beginner.holdings,
            **self._outgoing_migrations.holdings,
            "tasks": len(self._tasks),
        }

    @property
    def probing(self) -> bool:
        return self._beginner.probing or self._outgoing_migrations.probing

    def use_through(self, router_instance_id: str) -> tuple[TenantUse, ...]:
        """What tenants use here through other routers than this one."""
        return self._meter.others(router_instance_id, (r.asked for r in self._running.values()))

    @property
    def num_sessions(self) -> int:
        """Routers with a stream, or with one that broke a moment ago."""
        return len(self._sessions)

    def session(self, router_instance_id: str) -> RouterSession:
        """The router's session, new or the one that a broken stream left behind.

        Raises Overloaded.
        """
        session = self._sessions.get(router_instance_id)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise Overloaded("too many routers are connected to this decode worker")
            session = self._sessions[router_instance_id] = RouterSession(router_instance_id)
        return session

    def start(
        self,
        session: RouterSession,
        attempt: Attempt,
        ticket: TransferRequest | None,
        max_unconfirmed: int,
    ) -> None:
        """Begins an attempt. Without a ticket its input is prefilled here.

        Whatever goes wrong is told in the session's frames, never raised.
        """
        known = self._running.get(attempt.key)
        if known is not None and known.session is session:
            return
        if (refusal := self._refusal(known)) is not None:
            session.failed(Failure(attempt.key, attempt.choices, refusal))
            return
        trace = AttemptTrace(self._tracer, attempt, collects=ticket is not None)
        choices, began = set(attempt.choices), time.monotonic()
        running = Running(attempt, session, ticket, max_unconfirmed, choices, began, trace)
        self._running[attempt.key] = running
        self._meter.began(*running.asked)
        session.open(attempt.keys(), attempt.position)
        running.beginning = self._run(self._begin(running))

    def cancel(self, session: RouterSession, key: AttemptKey, choices: Collection[int]) -> None:
        """Ends choices of an attempt (none named: all). Unknown and others' ones are no error."""
        running = self._running.get(key)
        if running is None or running.session is not session:
            return
        ending = running.choices.intersection(choices) if choices else set(running.choices)
        for choice in ending:
            session.forget(SequenceKey(key.request_id, choice, key.attempt))
        self._left(running, ending)
        if not running.choices:
            self._end(running, Cancelled("cancelled"))
        elif ending:
            self._free(key, *ending)

    def hand_over(
        self,
        session: RouterSession,
        key: SequenceKey,
        handover_id: bytes,
        receiver_instance_id: str,
    ) -> None:
        """Gives a running sequence to another decode worker, with its KV; or says that it stays.

        What is asked again while it leaves changes nothing.
        """
        running = self._running.get(AttemptKey(key.request_id, key.attempt))
        known = running is not None and running.session is session
        possible = known and len(handover_id) == HANDOVER_ID_BYTES
        if running is None or not possible or not running.may_leave(key.choice):
            session.migrated_out(MigratedOut(key, handover_id, None))
        elif key.choice not in running.outgoing_migrations:
            running.outgoing_migrations[key.choice] = self._run(
                self._depart(running, key, handover_id, receiver_instance_id)
            )

    def confirm(self, session: RouterSession, positions: Mapping[SequenceKey, int]) -> None:
        """Output positions below these hold no stop string. Unknown sequences are no error."""
        for key, position in positions.items():
            running = self._running.get(AttemptKey(key.request_id, key.attempt))
            if running is None or running.session is not session:
                continue
            if running.beginning is None:
                self._confirmations.add({key: position})
            else:
                # Token 0 came from prefill, and the scheduler does not know of it yet.
                running.confirmed[key] = position

    def resume(
        self, session: RouterSession, positions: Mapping[SequenceKey, int]
    ) -> list[SequenceKey]:
        """Ties a router's new stream to what runs here; returns what is no longer here."""
        lost, dropped = session.resume(positions)
        for key in dropped:
            self.cancel(session, AttemptKey(key.request_id, key.attempt), (key.choice,))
        return lost

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes what one step made. Called on the event loop by the engine thread."""
        for event in events:
            match event:
                case NewTokens(tokens):
                    DECODED.inc(sum(len(t.token_ids) for t in tokens))
                    for choice_tokens in tokens:
                        self._tokens(choice_tokens)
                case KvComplete(key):
                    if (running := self._running.get(key)) is not None:
                        self._kv_ready(running, event)
                case Held():
                    self._outgoing_migrations.held(event)
                case AttemptFailed(key, choices, error):
                    self._failed(key, choices, error)
                case _:
                    pass

    async def drain(self) -> None:
        """Takes nothing new and returns when every attempt ended and its router has been told."""
        self._draining = True
        self._look_around()
        await self._quiet.wait()

    async def close(self) -> None:
        """Ends everything that is left and returns when no task of ours runs."""
        self._draining = True
        for session in list(self._sessions.values()):
            self._drop(session, Unavailable("this decode worker is leaving"))
        self._sweeping.cancel()
        await asyncio.wait({self._sweeping, *self._tasks})
        await self._confirmations.close()
        await self._outgoing_migrations.close()
        await self._beginner.close()

    def _refusal(self, known: Running | None) -> BatonError | None:
        if self._draining:
            return Unavailable("this decode worker is draining")
        if known is not None:
            return InvalidArgument("this attempt already runs here", field="attempt")
        if len(self._running) >= MAX_ATTEMPTS:
            return Overloaded("too many attempts are on this decode worker", retry_after_s=1.0)
        return None

    async def _begin(self, running: Running) -> None:
        key = running.attempt.key
        try:
            await self._beginner.begin(running)
            running.beginning = None
            self._confirmations.add(running.confirmed)
        except BatonError as error:
            self._failed(key, (), error)
        except Exception:
            about = named(key.request_id, running.trace.trace_id)
            log.exception("an attempt could not be started", extra=about)
            self._failed(key, (), Internal("the decode worker could not start this attempt"))

    async def _depart(
        self, running: Running, key: SequenceKey, handover_id: bytes, receiver_instance_id: str
    ) -> None:
        """Owns a choice from the wish that it leaves until its hand-over has ended."""
        session, whole = running.session, AttemptKey(key.request_id, key.attempt)
        about = named(key.request_id, running.trace.trace_id)

        def say(position: int | None) -> None:
            session.migrated_out(MigratedOut(key, handover_id, position))

        try:
            held = await self._outgoing_migrations.hold(key)
            if held is None:
                del running.outgoing_migrations[key.choice]
                say(None)
                return
            position = held.newest.position + 1
            with running.trace.giving():
                await self._outgoing_migrations.give(
                    held, handover_id, receiver_instance_id, lambda: say(position), about
                )
        except BatonError as error:
            self._free(whole, key.choice)
            self._failed(whole, (key.choice,), error)
        except Exception:
            log.exception("a sequence could not be handed over", extra=about)
            self._free(whole, key.choice)
            self._failed(whole, (key.choice,), Internal("the decode worker could not hand over"))
        else:
            self._free(whole, key.choice)
            session.forget(key)
            self._left(running, {key.choice})
            if not running.choices:
                self._forget(running)
        self._look_around()

    async def _sweep(self) -> None:
        """Frees what belongs to routers that are gone. Runs for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            window = now - self._resume_window_s
            for session in list(self._sessions.values()):
                session.forget_ended(window)
                if session.broken_at is not None and session.broken_at < window:
                    self._drop(session, Cancelled("the router left"))
                elif session.busy_since is not None and session.busy_since < now - STUCK_S:
                    log.warning("a router reads nothing: its session is dropped")
                    self._drop(session, Cancelled("the router reads nothing"))
            self._look_around()

    def _tokens(self, tokens: ChoiceTokens) -> None:
        key = AttemptKey(tokens.key.request_id, tokens.key.attempt)
        running = self._running.get(key)
        if running is None or tokens.key.choice not in running.choices:
            return
        running.session.tokens(tokens)
        self._meter.made(*running.asked, len(tokens.token_ids))
        if tokens.finish_reason is not None:
            self._left(running, {tokens.key.choice})
            if not running.choices:
                self._forget(running)

    def _kv_ready(self, running: Running, event: KvComplete) -> None:
        cached, received = event.cached_tokens, running.received_bytes
        wait_s = time.monotonic() - running.began
        count_kv(running, cached, wait_s)
        running.trace.kv_ready(cached, received)
        told = Started(event.key, cached, received, wait_s, event.prompt_logprobs)
        running.session.started(told)

    def _failed(self, key: AttemptKey, choices: Iterable[int], error: BatonError) -> None:
        """choices: none means all."""
        running = self._running.get(key)
        if running is None:
            return
        ending = running.choices.intersection(tuple(choices) or running.choices)
        if not ending:
            return
        self._left(running, ending)
        running.session.failed(Failure(key, tuple(sorted(ending)), error))
        if not running.choices:
            self._end(running, error)

    def _forget(self, running: Running, error: BatonError | None = None) -> None:
        del self._running[running.attempt.key]
        running.trace.gone(error)

    def _end(self, running: Running, error: BatonError) -> None:
        """Ends an attempt early: its task first, then its blocks, in this order."""
        key = running.attempt.key
        self._forget(running, error)
        task, running.beginning = running.beginning, None

        def free(_: object = None) -> None:
            self._free(key)

        if task is None or task is asyncio.current_task():
            free()
        else:
            task.cancel()
            task.add_done_callback(free)

    def _left(self, running: Running, choices: Collection[int]) -> None:
        """These choices are no more; nor is any task that was giving them away."""
        running.choices.difference_update(choices)
        for choice in choices:
            task = running.outgoing_migrations.pop(choice, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _free(self, key: AttemptKey, *choices: int) -> None:
        """Gives back what the engine has of these choices; none named: all."""
        self._post(lambda loop: loop.scheduler.cancel(key, choices))

    def _run(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _drop(self, session: RouterSession, error: BatonError) -> None:
        """Ends a router's attempts and forgets it."""
        self._sessions.pop(session.router_instance_id, None)
        for running in [r for r in self._running.values() if r.session is session]:
            self._failed(running.attempt.key, (), error)
        session.cut()

    def _look_around(self) -> None:
        """Whether a drain is over."""
        told = not any(session.has_news for session in self._sessions.values())
        if self._draining and told and not self._running:
            self._quiet.set()

    def _post(self, function: Callable[[EngineLoop], object]) -> None:
        # An engine that has stopped has nothing left to free.
        with suppress(Unavailable):
            self._engine.post(function)
