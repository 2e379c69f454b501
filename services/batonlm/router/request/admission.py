"""Admission of every request of every public route: core's admission with this router's clock and
fleet.

`receive` comes first, before the bytes of a request are read or, over gRPC, before they are parsed.
An admitted request gets a RequestContext, which holds everything that it was granted until it is
released.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from batonlm.core.admission.admission import (
    Admission,
    AdmissionCharge,
    AdmissionLimits,
    Ask,
    FleetState,
    Holding,
)
from batonlm.core.admission.concurrency_limiter import (
    FIRST_WINDOW,
    LARGEST_WINDOW,
    WINDOW_STEP,
    ConcurrencyLimiter,
)
from batonlm.core.admission.fair_queue import DrainRate, FairQueue
from batonlm.core.admission.tenant_budgets import OthersUse, Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, Reason
from batonlm.core.request.request import (
    ChatPrompt,
    Prompt,
    Request,
    StopParams,
    TextPrompt,
    TokenPrompt,
    VectorPrompt,
)
from batonlm.core.routing.failures import Quarantine, RetryBudget
from batonlm.core.routing.load import TenantUse
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.observe.stage_timer import StageTimer
from batonlm.router.request.dispatcher import Dispatcher, PendingAttempt
from batonlm.router.request.pacing import DeferredCalls, LoadMonitor
from batonlm.router.workers.adapters import AdapterManager
from batonlm.router.workers.clients import TOKEN_ID_BYTES
from batonlm.router.workers.encoders import input_bytes
from batonlm.router.workers.fleet import Fleet
from batonlm.router.workers.work_queue import AskedBy

REQUEST_ID_BYTES = 16
"""All random, so that nobody can guess the id of another's request."""

MAX_QUEUED_TOKENS = 1 << 20
"""Most expected tokens of all queued requests together."""

MAX_QUEUED = 1024
"""Most queued requests, which bounds the memory of the queue. How long a request may wait is
max_queue_s."""

LOOK_S = 0.5
"""Seconds between two readings of what workers report about other routers; workers report as often.
"""

SPECIAL_TOKENS = 16
"""Most tokens that a tokenizer adds to a text, and to each message of a conversation for its role.
"""

_CLIENTS_FAULTS = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.MODEL_NOT_FOUND,
        Reason.UNIMPLEMENTED,
        Reason.CANCELLED,
    }
)


@dataclass(slots=True, eq=False)
class RequestContext:
    """The state of one admitted request for its whole life.

    The code that gets it from the AdmissionController releases it.
    """

    request: Request
    request_id: str
    deadline: float
    """When it must have ended, on the running loop's clock."""
    input_bytes: int
    """Most bytes of its prompt and its grammar, as they are sent to a tokenizer."""
    charge: AdmissionCharge
    """What is charged to the router's and its tenant's budgets."""
    stages: StageTimer
    """Its stages, its trace and its record."""
    controller: AdmissionController
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has its first workers, or never will."""
    was_placed: bool = False
    alias: str = ""
    """The name that it asked for, where that stands for models."""
    adapter: str = ""
    """The name of the LoRA adapter that it runs with, once that is known."""

    @property
    def stream_id(self) -> str:
        """See `Request.stream_id`."""
        return self.request.stream_id(self.request_id)

    @property
    def caller(self) -> AskedBy:
        """The identity of the request for the tokenizer client."""
        trace = self.stages.trace.stage_context
        return AskedBy(self.request_id, self.request.tenant, self.deadline, trace)

    def on_placed(self) -> None:
        """An attempt of the request has workers."""
        self.was_placed = True
        self.charge.placed()
        self.placed.set()

    def release(self, output: int, error: BaseException | None) -> None:
        """Returns all that is held; idempotent. output: tokens of all its choices. error: the
        request's failure, or None."""
        now, at_fault = self.controller.dispatcher.now(), is_clients_fault(error, self.request)
        self.charge.release(output, now, finished=error is None, at_fault=at_fault)
        self.placed.set()


class AdmissionController:
    """The admission of one router."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        live_replicas: Callable[[], int],
    ) -> None:
        """live_replicas: returns the routers that share tenants' limits, including this one."""
        self.queue: FairQueue[PendingAttempt] = FairQueue(
            max_tokens=MAX_QUEUED_TOKENS, max_entries=MAX_QUEUED
        )
        self._drain = DrainRate()
        self.admission = Admission(
            AdmissionLimits(config.max_requests, config.max_tokens, config.max_queue_s),
            self.queue,
            self._drain,
            random.random,
        )
        self.dispatcher = Dispatcher(
            fleet,
            self.queue,
            self._drain,
            ConcurrencyLimiter(FIRST_WINDOW, WINDOW_STEP, LARGEST_WINDOW),
            max_queue_s=config.max_queue_s,
            retry_after_s=self.admission.retry_after_s,
        )
        self._fleet = fleet
        self._live_replicas = live_replicas
        self._metrics = metrics
        self._others = OthersUse()
        self._kv_tokens: int | None = None
        self._models: frozenset[str] = frozenset()
        self._looked_at = float("-inf")

    @property
    def held(self) -> dict[str, int]:
        """What requests hold here, by kind; each is 0 when there are no requests."""
        admission = self.admission
        return {
            "granted_requests": admission.requests.total,
            "granted_tokens": admission.tokens.total,
            "input_bytes": admission.input_bytes.total,
            "unplaced_tokens": admission.unplaced.total,
            **self.dispatcher.held,
        }

    def precheck(self, tenant: Tenant, priority: int) -> None:
        """Raises Refusal when even the smallest request of the tenant would be refused."""
        now = self.dispatcher.now()
        with self._counted(tenant):
            self.admission.precheck(tenant, priority, self._outlook(tenant, now), now)

    def receive(self, tenant: Tenant, size: int) -> Holding:
        """Reserves room for this many bytes of a request. Raises Refusal."""
        now = self.dispatcher.now()
        with self._counted(tenant):
            return self.admission.receive(tenant, size, self._outlook(tenant, now), now)

    def fault(self, tenant: Tenant) -> None:
        """Counts a request that was not admitted because of the client's own fault."""
        now = self.dispatcher.now()
        self.admission.fault(tenant, self._outlook(tenant, now), now)

    def open(
        self,
        request: Request,
        stages: StageTimer,
        deadline: float,
        holding: Holding | None = None,
        *,
        generates: bool = True,
        elsewhere: bool = False,
    ) -> RequestContext:
        """Admits a request whose prompt is not encoded yet.

        holding: the room of its bytes, which the context takes over; None: it is reserved here.
        generates: False when text is only encoded or decoded. elsewhere: whether another Baton runs
        it. Raises Refusal, or InvalidArgument for a priority that the tenant may not use.
        """
        now = self.dispatcher.now()
        least, most, input_bytes = prompt_bounds(request.prompt)
        if request.grammar is not None:
            input_bytes += len(request.grammar.text)
        choices = request.n if generates else 0
        ask = Ask(
            request.tenant,
            request.priority,
            choices=choices,
            encodes=isinstance(request.prompt, VectorPrompt),
            least_tokens=least,
            most_tokens=most,
            longest_output=choices * request.least_room,
            model=request.model,
            elsewhere=elsewhere,
        )
        held = holding or self.receive(request.tenant, input_bytes)
        outlook = self._outlook(request.tenant, now)
        try:
            with self._counted(request.tenant):
                charge = self.admission.open(ask, held, outlook, deadline - now, now)
        except BaseException:
            held.release()
            raise
        return RequestContext(
            request,
            secrets.token_hex(REQUEST_ID_BYTES),
            deadline,
            input_bytes,
            charge,
            stages,
            self,
        )

    def settle(self, context: RequestContext, prompt: int, stop: StopParams, model: str) -> None:
        """Charges for the encoded prompt and the longest output. model: the name of the one that
        runs it. Raises Refusal."""
        now, tenant = self.dispatcher.now(), context.request.tenant
        longest = context.request.n * stop.max_tokens
        outlook = self._outlook(tenant, now)
        try:
            context.charge.settle(
                prompt, longest, outlook, context.deadline - now, now, model, context.adapter
            )
        except Refusal as refusal:
            self._metrics.refused(refusal.limit, tenant)
            raise

    async def close(self) -> None:
        await self.dispatcher.close()

    @contextmanager
    def _counted(self, tenant: Tenant) -> Iterator[None]:
        """Counts a request that is not admitted as ended, and a refusal by its limit, too."""
        try:
            yield
        except BatonError as error:
            if isinstance(error, Refusal):
                self._metrics.refused(error.limit, tenant)
            self._metrics.ended(error, tenant)
            raise

    def _outlook(self, tenant: Tenant, now: float) -> FleetState:
        self._look(now)
        return FleetState(
            self._kv_tokens,
            self.dispatcher.window.round_trip_s,
            self._live_replicas(),
            self._others.of(tenant.name),
            self._models,
        )

    def _look(self, now: float) -> None:
        """Reads what the workers report."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        reports: dict[str, tuple[TenantUse, ...]] = {}
        decodes = self._fleet.decodes.workers()
        for pool in (self._fleet.decodes, self._fleet.prefills):
            for worker in pool.workers():
                if worker.load is not None:
                    reports[worker.identity.instance_id] = worker.load.tenants
        self._others.see(reports, now)
        self._models = frozenset(worker.model.name for worker in decodes)
        reported = [(w.load.free_blocks, w.description) for w in decodes if w.load is not None]
        known = bool(reported) and all(description.num_blocks for _, description in reported)
        free = sum(blocks * max(1, description.block_size) for blocks, description in reported)
        self._kv_tokens = free if known else None


@dataclass(frozen=True, slots=True)
class RouterServices:
    """What all requests of one router share."""

    fleet: Fleet
    config: RouterConfig
    metrics: RouterMetrics
    dispatcher: Dispatcher
    budget: RetryBudget
    """Bounds the retries of requests that have no token yet."""
    load: LoadMonitor
    deferred_calls: DeferredCalls
    background: Callable[[Coroutine[None, None, None]], object]
    """Runs what must outlive its request, such as the cancellation on a worker."""
    adapters: AdapterManager
    quarantine: Quarantine = field(default_factory=Quarantine)


def is_clients_fault(error: BaseException | None, request: Request) -> bool:
    """Whether a request failed because of its content, because its client left, or because its
    client set too short a deadline."""
    if isinstance(error, BatonError):
        too_soon = error.reason is Reason.DEADLINE_EXCEEDED and request.deadline_s is not None
        return too_soon or error.reason in _CLIENTS_FAULTS
    return isinstance(error, asyncio.CancelledError)


def prompt_bounds(prompt: Prompt) -> tuple[int, int, int]:
    """Returns the fewest and the most tokens of the prompt, and its bytes. A token covers at least
    one byte, except for special tokens that are added."""
    match prompt:
        case TokenPrompt(token_ids=ids):
            return len(ids), len(ids), TOKEN_ID_BYTES * len(ids)
        case TextPrompt(text=text):
            size = len(text.encode())
            return 1, size + SPECIAL_TOKENS, size
        case VectorPrompt(inputs=inputs):
            size = sum(map(input_bytes, inputs))
            return len(inputs), size + SPECIAL_TOKENS * len(inputs), size
        case ChatPrompt():
            size = sum(len(text.encode()) for text in _texts(prompt))
            return 1, size + SPECIAL_TOKENS * (len(prompt.messages) + 2), size


def _texts(chat: ChatPrompt) -> Iterator[str]:
    """Yields all texts that the template may render."""
    yield chat.template_kwargs
    yield chat.template
    for message in chat.messages:
        yield message.content
        yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments
    for tool in chat.tools:
        yield tool.name
        yield tool.description
        yield tool.parameters
