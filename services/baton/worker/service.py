"""AttemptService, what the services of prefill and decode workers have in common.

In: attempts from the wire, events from the engine thread. Out: answers, and KV on offer to other
workers. What differs is what one role keeps of an attempt and when an attempt ends.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from baton.core.admission.tenant_budgets import UseMeter
from baton.core.errors import BatonError, InvalidArgument, Overloaded, Unavailable
from baton.core.request.attempt import Attempt, AttemptKey
from baton.core.routing.load import TenantUse, WorkerState
from baton.core.scheduler.events import Event
from baton.core.scheduler.loop import EngineLoop
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.rpc import metrics
from baton.rpc.tracing import Tracer
from baton.transfer.sender import KvSender

PREFILLED = metrics.counter(metrics.PREFILL_TOKENS)
CACHED = metrics.counter(metrics.CACHED_TOKENS)
STAGE_TIME = metrics.histogram(metrics.STAGE_TIME)

DEFAULT_DEADLINE_S = 600.0
"""Of an attempt that names none."""

MAX_ATTEMPTS = 4096

AttemptT = TypeVar("AttemptT")
"""What one role keeps of an attempt."""


class AttemptService(ABC, Generic[AttemptT]):
    """Lives on the event loop, between the wire and the engine thread."""

    role: str

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float,
        tracer: Tracer,
    ) -> None:
        """handover_timeout_s: for a whole hand-over, the prompt's queueing and computing included.
        sender: gives KV to other workers; `close` closes it."""
        self.attempts: dict[AttemptKey, AttemptT] = {}
        self._engine = engine
        self._sender = sender
        self._grammars = grammars
        self._handover_timeout_s = handover_timeout_s
        self._tracer = tracer
        self._meter = UseMeter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._drained = asyncio.Event()

    @property
    @abstractmethod
    def state(self) -> WorkerState: ...

    @property
    def num_attempts(self) -> int:
        return len(self.attempts)

    @property
    def holdings(self) -> dict[str, int]:
        """What is held for attempts besides blocks and buffers, by kind; 0 when none is here."""
        return {**self._sender.holdings, "tasks": len(self._tasks)}

    @property
    def probing(self) -> bool:
        """Whether a probe holds something of it."""
        return self._sender.probing

    def use_through(self, router_instance_id: str) -> tuple[TenantUse, ...]:
        """What tenants use here through other routers than this one."""
        return self._meter.others(router_instance_id, self._in_use())

    @abstractmethod
    def deliver(self, events: Sequence[Event]) -> None:
        """Takes what one step made. Called on the event loop by the engine thread. Events of an
        attempt, or a choice, that ended here meanwhile are dropped."""

    async def drain(self) -> None:
        """Takes nothing new and returns when nothing is left that another process waits for."""
        self._draining = True
        self._note_drained()
        await self._drained.wait()

    @abstractmethod
    async def close(self) -> None:
        """Ends everything that is left and returns when none of its tasks runs."""

    @abstractmethod
    def _in_use(self) -> Iterable[tuple[str, Attempt]]:
        """The attempts to count for tenants, with the routers that they came from."""

    @abstractmethod
    def _is_empty(self) -> bool:
        """Whether nothing is left that another process waits for."""

    def _note_drained(self) -> None:
        if self._draining and self._is_empty():
            self._drained.set()

    def _refusal(self, key: AttemptKey) -> BatonError | None:
        """Why an attempt is not taken on now."""
        if self._draining:
            return Unavailable(f"this {self.role} worker is draining")
        if key in self.attempts:
            return InvalidArgument("this attempt already runs here", field="attempt")
        if len(self.attempts) >= MAX_ATTEMPTS:
            return Overloaded(
                f"too many attempts are on this {self.role} worker", retry_after_s=1.0
            )
        return None

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _post(self, function: Callable[[EngineLoop], object]) -> None:
        # An engine that has stopped has nothing left to free.
        with suppress(Unavailable):
            self._engine.post(function)
