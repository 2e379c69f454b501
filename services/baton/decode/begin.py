"""Brings one attempt's input to the scheduler, with KV collected or to be computed here.

Whatever it has reserved when it ends early, the caller frees, with the scheduler's `cancel` after
this has ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from baton.core.errors import HandoverFailed
from baton.core.request.attempt import Attempt, SequenceKey
from baton.core.scheduler.decode import DecodeScheduler
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import Extents
from baton.core.scheduler.ports import CompiledGrammar
from baton.decode.attempt_trace import AttemptTrace
from baton.decode.sessions import RouterSession
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.transfer.receiver import Collected, KvReceiver, TransferRequest

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
        engine: EngineThread[DecodeScheduler],
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

            def ask(loop: EngineLoop[DecodeScheduler]) -> tuple[int | None, Extents, bool]:
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
