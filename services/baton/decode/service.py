"""Runs attempts on the engine, with KV collected or computed here; knows neither gRPC nor tensors.

An attempt lives from `start` until all its choices ended, failed or were cancelled. While its KV is
on the way a task owns it; afterwards the scheduler does. Blocks are given back by the scheduler's
`cancel`, which every early end goes through.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from baton.core.decode_scheduler import DecodeScheduler
from baton.core.errors import BatonError, Cancelled, Internal, Unavailable
from baton.core.events import Event, Failed, Tokens
from baton.core.events import Started as KvReady
from baton.core.load import WorkerState
from baton.core.loop import EngineLoop
from baton.decode.sessions import Failure, RouterSession, Started
from baton.engine.thread import EngineThread
from baton.kv.collector import Collected, Collector, Ticket
from baton.rpc import metrics

DECODED = metrics.counter(metrics.DECODE_TOKENS)
DEFAULT_DEADLINE_S = 600.0


@dataclass(slots=True)
class Running:
    """One attempt on this worker and the choices that have not ended."""

    attempt: Attempt
    session: RouterSession
    choices: set[int]
    began: float
    local: bool
    beginning: asyncio.Task[None] | None = None


class DecodeService:
    """Decode's business between the wire and the engine thread. Lives on the event loop."""

    def __init__(
        self,
        engine: EngineThread[DecodeScheduler],
        collector: Collector,
        *,
        handover_timeout_s: float,
        resume_window_s: float,
    ) -> None:
        self._engine = engine
        self._collector = collector
        self._handover_timeout_s = handover_timeout_s
        self._resume_window_s = resume_window_s
        self._running: dict[AttemptKey, Running] = {}
        self._sessions: dict[str, RouterSession] = {}
        self._draining = False
        self._empty = asyncio.Event()
        self._sweeper = asyncio.create_task(self._sweep())

    @property
    def state(self) -> WorkerState:
        return WorkerState.DRAINING if self._draining else WorkerState.SERVING

    @property
    def num_attempts(self) -> int:
        return len(self._running)

    def session(self, router_incarnation: str) -> RouterSession:
        """The router's session, new or the one that a broken stream left behind."""
        session = self._sessions.get(router_incarnation)
        if session is None:
            session = self._sessions[router_incarnation] = RouterSession(router_incarnation)
        session.broken_at = None
        return session

    def start(
        self,
        session: RouterSession,
        attempt: Attempt,
        ticket: Ticket | None,
        max_unconfirmed: int,
    ) -> None:
        """Begins an attempt. Without a ticket its input is prefilled here.

        Whatever goes wrong is told in the session's frames, never raised.
        """
        if self._draining:
            return self._refuse(session, attempt, Unavailable("this decode worker is draining"))
        if attempt.key in self._running:
            return None
        running = Running(
            attempt, session, set(attempt.choices), time.monotonic(), local=ticket is None
        )
        self._running[attempt.key] = running
        session.open(attempt.keys(), attempt.position)
        running.beginning = asyncio.create_task(self._begin(running, ticket, max_unconfirmed))
        return None

    def cancel(self, key: AttemptKey, choices: Sequence[int] = ()) -> None:
        """Ends choices of an attempt (none named: all). Unknown ones are no error."""
        running = self._running.get(key)
        if running is None:
            return
        ending = set(choices or running.choices)
        for choice in ending:
            running.session.forget(SequenceKey(key.request_id, choice, key.attempt))
        running.choices -= ending
        if running.choices:
            self._engine.post(lambda loop: loop.scheduler.cancel(key, tuple(ending)))
        else:
            self._end(running)

    def confirm(self, positions: dict[SequenceKey, int]) -> None:
        def confirm(loop: EngineLoop[DecodeScheduler]) -> None:
            for key, position in positions.items():
                loop.scheduler.confirm(key, position)

        self._engine.post(confirm)

    def resume(
        self, session: RouterSession, positions: dict[SequenceKey, int]
    ) -> list[SequenceKey]:
        """Ties a router's new stream to what runs here; returns what is no longer here."""
        lost, dropped = session.resume(positions)
        for key in dropped:
            self.cancel(AttemptKey(key.request_id, key.attempt), (key.choice,))
        return lost

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes what one step made. Called on the event loop by the engine thread."""
        now = time.monotonic()
        for event in events:
            match event:
                case Tokens(tokens):
                    DECODED.inc(sum(len(t.token_ids) for t in tokens))
                    for choice_tokens in tokens:
                        self._tokens(choice_tokens, now)
                case KvReady(key, cached_tokens):
                    running = self._running.get(key)
                    if running is not None and running.local:
                        wait_s = now - running.began
                        running.session.started(Started(key, cached_tokens, 0, wait_s))
                case Failed(key, choices, error):
                    self._failed(key, choices, error)
                case _:
                    pass

    async def _sweep(self) -> None:
        """Frees what belongs to routers whose stream broke and did not come back. Runs for ever."""
        while True:
            await asyncio.sleep(0.25)
            limit = time.monotonic() - self._resume_window_s
            for session in list(self._sessions.values()):
                session.forget_ended(limit)
                if session.broken_at is not None and session.broken_at < limit:
                    self._drop(session)

    async def drain(self) -> None:
        """Takes nothing new and returns when every attempt ended."""
        self._draining = True
        self._note_empty()
        await self._empty.wait()

    async def close(self) -> None:
        self._sweeper.cancel()
        tasks = [r.beginning for r in self._running.values() if r.beginning is not None]
        for session in list(self._sessions.values()):
            self._drop(session)
        for task in tasks:
            await asyncio.wait([task])

    async def _begin(self, running: Running, ticket: Ticket | None, max_unconfirmed: int) -> None:
        attempt, key = running.attempt, running.attempt.key
        now = time.monotonic()
        try:
            if ticket is None:
                await self._engine.call(
                    lambda loop: loop.scheduler.add(attempt, now, max_unconfirmed=max_unconfirmed)
                )
                running.beginning = None
                return
            timeout_s = min(attempt.remaining_s or DEFAULT_DEADLINE_S, self._handover_timeout_s)
            async with asyncio.timeout(timeout_s):
                collected = await self._collect(attempt, ticket, max_unconfirmed)
            cached = collected.cached_positions
            running.session.started(
                Started(key, cached, collected.received_bytes, time.monotonic() - running.began)
            )
            await self._engine.call(
                lambda loop: loop.scheduler.admit(key, collected.tokens, time.monotonic())
            )
            running.beginning = None
        except TimeoutError:
            self._failed(key, (), Unavailable("the hand-over took too long"))
        except BatonError as error:
            self._failed(key, (), error)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._failed(key, (), Internal("the decode worker failed to start this sequence"))
            raise

    async def _collect(self, attempt: Attempt, ticket: Ticket, max_unconfirmed: int) -> Collected:
        key = attempt.key

        async def reserve() -> int | None:
            now = time.monotonic()
            return await self._engine.call(
                lambda loop: loop.scheduler.reserve(attempt, now, max_unconfirmed=max_unconfirmed)
            )

        async def unpack(first_position: int, count: int, payload: memoryview) -> None:
            await self._engine.call_to_end(
                lambda loop: loop.runner.unpack(
                    loop.scheduler.extents(key), first_position, count, payload
                )
            )

        return await self._collector.collect(ticket, reserve, unpack)

    def _tokens(self, tokens: ChoiceTokens, now: float) -> None:
        key = AttemptKey(tokens.key.request_id, tokens.key.attempt)
        running = self._running.get(key)
        if running is None or tokens.key.choice not in running.choices:
            return
        running.session.tokens(tokens, now)
        if tokens.finish_reason is not None:
            running.choices.discard(tokens.key.choice)
            if not running.choices:
                del self._running[key]
                self._note_empty()

    def _failed(self, key: AttemptKey, choices: Sequence[int], error: BatonError) -> None:
        running = self._running.get(key)
        if running is None:
            return
        ending = tuple(sorted(set(choices or running.choices) & running.choices))
        running.choices -= set(ending)
        running.session.failed(Failure(key, ending, error))
        if not running.choices:
            self._end(running)

    def _refuse(self, session: RouterSession, attempt: Attempt, error: BatonError) -> None:
        session.failed(Failure(attempt.key, attempt.choices, error))

    def _end(self, running: Running) -> None:
        """Ends an attempt early: its task first, then its blocks, in this order."""
        key = running.attempt.key
        self._running.pop(key, None)
        self._note_empty()
        task, running.beginning = running.beginning, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            task.add_done_callback(lambda _: self._free(key))
        else:
            self._free(key)

    def _note_empty(self) -> None:
        if self._draining and not self._running:
            self._empty.set()

    def _free(self, key: AttemptKey) -> None:
        self._engine.post(lambda loop: loop.scheduler.cancel(key))

    def _drop(self, session: RouterSession) -> None:
        self._sessions.pop(session.router_incarnation, None)
        for running in [r for r in self._running.values() if r.session is session]:
            self._failed(running.attempt.key, (), Cancelled("the router left"))
