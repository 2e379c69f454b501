"""AttemptService, the base of the services of prefill and decode workers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from batonlm.core.admission.tenant_budgets import UseMeter
from batonlm.core.errors import BatonError, InvalidArgument, Overloaded, Unavailable
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import TenantUse, WorkerState
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.rpc import metrics
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import Tracer
from batonlm.transfer.receiver import KvReceiver
from batonlm.transfer.sender import KvSender
from batonlm.v1.types_pb2 import PrefixCollected, PrefixRestored
from batonlm.worker.prefixes import PrefixExchange
from batonlm.worker.tiers.prefix_tiers import PrefixTiers

PREFILLED = metrics.counter(metrics.PREFILL_TOKENS)
CACHED = metrics.counter(metrics.CACHED_TOKENS)
STAGE_TIME = metrics.histogram(metrics.STAGE_TIME)

DEFAULT_DEADLINE_S = 600.0
"""The deadline of an attempt without one."""

HANDOVER_TIMEOUT_S = 300.0
"""The limit of a whole hand-over, with the prompt's queueing and computing. Requests have deadlines
of their own; this one frees what is held for a peer that neither works nor ends."""

MAX_ATTEMPTS = 4096

AttemptT = TypeVar("AttemptT")
"""A role's state of one attempt."""


class BroughtPrefix(NamedTuple):
    """What came of an input's beginning before it was queued."""

    restored: PrefixRestored | None = None
    """From tiers; None where none can have had it."""
    collected: PrefixCollected | None = None
    """From another worker's cache; None where none was named."""


NOTHING_BROUGHT = BroughtPrefix()


class AttemptService(ABC, Generic[AttemptT]):
    """Runs attempts: takes them from the wire and events from the engine thread, returns answers,
    and offers KV to other workers. Runs on the event loop. Roles differ in the state of an attempt
    and in when it ends."""

    role: str

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        receiver: KvReceiver,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float,
        tracer: Tracer,
        tiers: PrefixTiers | None,
    ) -> None:
        """handover_timeout_s: see HANDOVER_TIMEOUT_S. sender, receiver: move KV to and from other
        workers; tiers: to and from other places than workers; `close` closes them."""
        self.attempts: dict[AttemptKey, AttemptT] = {}
        self._engine = engine
        self._sender = sender
        self._receiver = receiver
        self._prefixes = PrefixExchange(engine, sender, receiver)
        self._tiers = tiers
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
    def orphans(self) -> tuple[bytes, ...]:
        """The adoption ids of sequences whose routers are gone and that another may go on with."""
        return ()

    @property
    def holdings(self) -> dict[str, int]:
        """What attempts hold besides blocks and buffers, by kind; all 0 without attempts."""
        moving = self._sender.holdings | self._receiver.holdings | self._prefixes.holdings
        return {**moving, "tasks": len(self._tasks)}

    @property
    def probing(self) -> bool:
        """Whether a peer holds resources of this worker without an attempt here: for a probe, or
        for a prefix."""
        return self._sender.probing or self._receiver.probing or self._prefixes.offers_some

    def use_through(self, router_instance_id: str) -> tuple[TenantUse, ...]:
        """The tenants' usage of this worker through all routers but this one."""
        return self._meter.others(router_instance_id, self._in_use())

    @abstractmethod
    def deliver(self, events: Sequence[Event]) -> None:
        """Takes the events of one step, on the event loop. Events of attempts or choices that have
        ended meanwhile are dropped."""

    async def drain(self) -> None:
        """Refuses new attempts, and returns when no other process waits for anything here."""
        self._draining = True
        self._note_drained()
        await self._drained.wait()

    @abstractmethod
    async def close(self) -> None:
        """Ends all attempts, and returns when all tasks have ended."""

    @abstractmethod
    def _in_use(self) -> Iterable[tuple[str, Attempt]]:
        """The attempts that count towards tenants' usage, with their routers' instance ids."""

    @abstractmethod
    def _is_empty(self) -> bool:
        """Whether no other process waits for anything here."""

    async def _bring_prefix(
        self, attempt: Attempt, sender: WorkerIdentity | None, trace_id: str
    ) -> BroughtPrefix:
        """Brings the beginning of an attempt's input into the prefix cache, from tiers and then
        from the sender's cache, if one is named.

        Raises Overloaded where the queue is full: what came would be of no use.
        """
        if self._tiers is None and sender is None:
            return NOTHING_BROUGHT
        self._engine.check_limit(attempt)
        restored = None if self._tiers is None else await self._tiers.restore(attempt)
        if sender is None:
            return BroughtPrefix(restored)
        about = named(attempt.request_id, trace_id)
        return BroughtPrefix(restored, await self._prefixes.collect(attempt, sender, about))

    def _note_drained(self) -> None:
        if self._draining and self._is_empty():
            self._drained.set()

    def _refusal(self, key: AttemptKey) -> BatonError | None:
        """The error for an attempt that cannot be accepted now; None to accept it."""
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
        # A stopped engine has nothing to free.
        with suppress(Unavailable):
            self._engine.post(function)
