"""The pipeline of every request; the only place that starts one.

reserve bytes → precheck → validate → admit → prepare (`preparation`) → RequestRunner (`runner`:
queue, attempts on prefill and decode, tokens to text) → EventStream
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from prometheus_client import CollectorRegistry

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenant_budgets import Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, DeadlineExceeded, InvalidArgument, Unavailable
from batonlm.core.observe.request_record import RequestRecord
from batonlm.core.request.attempt import Logprobs, TokenLog
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.request.request import Delta, Event, Request, StopParams
from batonlm.core.request.validation import validate
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.cascade import Cascade
from batonlm.core.routing.failures import RetryBudget
from batonlm.core.routing.step_back import Outcome
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import Objectives, RouterMetrics
from batonlm.router.observe.records import Records, UsageSink
from batonlm.router.observe.stage_timer import StageTimer, trace_of
from batonlm.router.request.admission import (
    AdmissionController,
    RequestContext,
    RouterServices,
    is_clients_fault,
)
from batonlm.router.request.cascade import Cascades
from batonlm.router.request.kept import KeptStreams
from batonlm.router.request.pacing import DeferredCalls, LoadMonitor
from batonlm.router.request.preparation import Preparation, Prepared
from batonlm.router.request.runner import RequestRunner
from batonlm.router.request.shadow import MAX_SHADOWS, ShadowRun, Shadows
from batonlm.router.request.upstream import Upstreams, UpstreamStream
from batonlm.router.workers.adapters import AdapterManager
from batonlm.router.workers.encoders import Vectors
from batonlm.router.workers.fleet import Fleet
from batonlm.router.workers.tokenizers import EncodedPrompt
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import OFF, Tracer, now

log = logging.getLogger(__name__)

COALESCE_ABOVE_CORES = 0.6
"""CPU load in cores above which tokens of a stream are coalesced."""


def left() -> BatonError:
    """Returns the error of requests that end or are refused because their router shuts down."""
    return Unavailable("This router is leaving.", retry_after_s=1.0)


RETRY_SHARE = 0.1
"""Retries of requests without tokens that were lost by a worker, per request started. A tenth adds
a tenth of load at most when every worker fails, as in gRPC's and Envoy's retry budgets."""

RETRIES_PER_S = 10.0
"""Retries per second of requests without tokens, in addition to the share of started requests."""

RETRY_BURST = 100
"""Most of these retries at once: a dying worker loses about so many requests that have no token."""


class EventStream(Protocol):
    """The events of one request for its client: Accepted, deltas, Finished."""

    tried_tokens: int
    """Tokens of a model that was asked before this one."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Returns the next event. Raises BatonError when the request failed, after all earlier
        events."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in a prefix cache, known with its first
        token."""

    def call_off(self) -> None:
        """Cancels the request if it still runs. Deltas that have arrived are returned before
        Cancelled is raised."""

    async def aclose(self) -> None:
        """Ends the request if it still runs; returns when all its resources are released."""


class FleetStream(EventStream):
    """The events of a request that runs on this router's workers.

    There is no queue: when the next event is read, all that is new becomes one delta per choice. A
    slow reader gets fewer, larger deltas, as do all clients while the router is too busy to send
    each token by itself.

    `aclose` may be called at any time, and more than once.
    """

    def __init__(
        self,
        runner: RequestRunner,
        task: asyncio.Task[None],
        made: Prepared,
        on_first_token: Callable[[], None],
        asked: Request | None = None,
    ) -> None:
        """runner, task: of the request, which this object cancels. asked: what the client asked,
        where the request asks for more log-probabilities."""
        self.tried_tokens = 0
        self._asked = asked
        self._runner = runner
        self._task = task
        self._events: deque[Event] = deque([made.accepted])
        self._on_first_token = on_first_token
        self._parts = made.parts
        self._began = False
        self._ended = False

    async def __anext__(self) -> Event:
        """Returns the next event. Raises BatonError when the request failed, after all earlier
        events."""
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            over = self._task.done()
            if self._collect():
                break
            if over:
                self._ended = True
                self._raise_failure()
                reasoning_tokens = sum(part.reasoning_tokens for part in self._parts)
                finished = self._runner.finished(reasoning_tokens)
                return replace(finished, tried_tokens=self.tried_tokens)
            await self._runner.news.wait()
            early_s = self._runner.coalescer.early_s
            if early_s > 0:
                # Waits for more tokens for the next event; the end of an answer is not delayed.
                await asyncio.wait((self._task,), timeout=early_s)
        return self._events.popleft()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in a prefix cache, known with its first
        token."""
        return self._runner.cached_tokens

    @property
    def model(self) -> ModelDescription:
        return self._runner.model

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and, so far, of all choices."""
        state = self._runner.state
        return len(state.prompt) + sum(map(len, state.logs))

    @property
    def failed(self) -> bool:
        """Whether the request has ended with a failure."""
        return self._task.done() and (self._task.cancelled() or bool(self._task.exception()))

    async def begun(self, num_tokens: int) -> list[Sequence[Logprobs]]:
        """Waits until every choice has so many tokens or has ended, or the request is over. Returns
        the log-probabilities of these tokens, if the request asks for them. Takes no event."""
        logs = self._runner.state.logs
        while not self._task.done() and any(
            len(log) < num_tokens and not log.ended for log in logs
        ):
            await self._runner.news.wait()
        return [log.logprobs(0, num_tokens) for log in logs]

    def call_off(self) -> None:
        self._runner.cancel()

    async def aclose(self) -> None:
        """Ends the request if it still runs; returns when all its resources are released."""
        self._ended = True
        self._events.clear()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _shown(self, delta: Delta) -> Delta:
        """Returns what of a delta the client asked for."""
        if self._asked is None or not delta.logprobs:
            return delta
        top = self._asked.sampling.top_logprobs
        logprobs = () if top is None else (replace(x, top=x.top[:top]) for x in delta.logprobs)
        return replace(delta, logprobs=tuple(logprobs))

    def _raise_failure(self) -> None:
        """Raises the failure of the task, which is over."""
        if self._task.cancelled():
            # Cancelled by the router's shutdown: readers end a request through `aclose`.
            error = left()
            error.request_id = self._runner.context.request_id
            raise error
        try:
            self._task.result()
        except BatonError as error:
            error.request_id = self._runner.context.request_id
            raise

    def _collect(self) -> bool:
        """Collects what is new of every choice; returns whether there is anything."""
        for output in self._runner.outputs:
            delta = output.take_delta()
            if delta is not None:
                parts, delta = self._parts, self._shown(delta)
                self._events.append(parts[delta.choice].of(delta) if parts else delta)
        if not self._events:
            return False
        self._runner.coalescer.emitted()
        if not self._began and self._runner.state.started:
            self._began = True
            self._on_first_token()
        return True


T = TypeVar("T")


class Pipeline:
    """Runs requests on a fleet. The creator of the fleet starts and closes it."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        live_replicas: Callable[[], int] = lambda: 1,
        tracer: Tracer = OFF,
        usage: UsageSink | None = None,
        aliases: Callable[[], Mapping[str, Alias]] | None = None,
    ) -> None:
        """live_replicas: returns the routers that share tenants' limits, including this one.
        aliases: returns the names that stand for models now; None: those of the configuration."""
        self._fleet = fleet
        self._tracer = tracer
        self._config = config
        self._metrics = metrics
        if config.target_first_token_ms:
            metrics.objectives = Objectives(
                config.target_first_token_ms / 1000, config.target_between_tokens_ms / 1000
            )
        self.gate = AdmissionController(fleet, config, metrics, live_replicas)
        self.records = Records(config, usage)
        own = config.own_aliases
        self.aliases = aliases or (lambda: own)
        self.adapter_manager = AdapterManager(fleet, config, self.aliases)
        self.services = RouterServices(
            fleet,
            config,
            metrics,
            self.gate.dispatcher,
            RetryBudget(share=RETRY_SHARE, per_s=RETRIES_PER_S, most=RETRY_BURST),
            LoadMonitor(COALESCE_ABOVE_CORES),
            DeferredCalls(),
            self._keep,
            self.adapter_manager,
        )
        self._preparation = Preparation(self.services, self.aliases)
        dispatcher = self.gate.dispatcher
        self._shadows = Shadows(self._for_shadows, metrics.shadows, dispatcher.turn_soon)
        dispatcher.on_waiting = self._shadows.drop
        self._cascades = Cascades(self, metrics.cascades)
        self._upstreams = Upstreams()
        self.kept = KeptStreams(self.open, self._keep, left)
        self._forwarded: set[UpstreamStream] = set()
        self._num_requests = 0
        self._leaving = False
        self.draining = False
        """Whether requests are refused because this router shuts down."""
        self._cut = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._preparing: set[asyncio.Timeout] = set()
        self._runners: set[RequestRunner] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def _for_shadows(self) -> Pipeline:
        """Returns a pipeline over the same workers that shares nothing else with this one."""
        apart = replace(
            self._config,
            max_requests=2 * MAX_SHADOWS,
            max_attempts=1,
            wait_timeout_s=1.0,
            timings=False,
            keep_replays=False,
        )
        return Pipeline(self._fleet, apart, RouterMetrics(CollectorRegistry()), aliases=dict)

    @property
    def request_timeout_s(self) -> float:
        """The time that a request has when it names none."""
        return self._config.request_timeout_s

    @property
    def num_requests(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._num_requests

    @property
    def held(self) -> dict[str, int]:
        """What requests hold of this router and on workers, by kind; each is 0 when there are no
        requests."""
        pools = (self._fleet.prefills, self._fleet.decodes, self._fleet.detokenizers)
        workers = [worker for pool in pools for worker in pool.workers()]
        return {
            **self.gate.held,
            "placed_sequences": sum(worker.placed_sequences for worker in workers),
            "placed_tokens": sum(worker.placed_tokens for worker in workers),
            "suspects": len(self.services.quarantine.taken),
        }

    def running_by_model(self) -> Counter[str]:
        """Requests with encoded prompts that have not ended, including those that wait for
        workers."""
        return Counter(runner.model.name for runner in self._runners)

    def held_by_model(self) -> Mapping[str, int]:
        """Requests that wait for the first worker of their model, or for an adapter on it."""
        return self._preparation.held.by_model

    def models(self) -> list[ModelDescription]:
        """The models that generate and can be requested now."""
        return self._preparation.models()

    def reasons(self, model: ModelDescription) -> bool:
        """Whether the model's answers may have reasoning."""
        return self._preparation.reasons(model)

    def adapters(self) -> list[tuple[ModelDescription, AdapterDescription]]:
        """The LoRA adapters that can be requested now, by name, each with its model."""
        return self._preparation.adapters()

    def aliased(self) -> dict[str, ModelDescription]:
        """The names that stand for models, each with the first of its models that can be requested
        now."""
        served = {model.name: model for model in (*self.models(), *self.sleeping())}
        found: dict[str, ModelDescription] = {}
        for alias, stands_for in self.aliases().items():
            names = [name for name in stands_for.models if name in served]
            if names:
                found[alias] = served[names[0]]
        return found

    def described(self, name: str) -> ModelDescription | None:
        """Returns the model of this name, or of the adapter of this name, if it can be requested
        now."""
        for model in self.models():
            if model.name == name:
                return model
        found = (model for model, adapter in self.adapters() if adapter.name == name)
        return next(found, None)

    def gone_back(self) -> dict[tuple[str, ...], float]:
        """Returns, by each name that stands for models, whether its former weights count here
        because a model did badly."""
        has_gone_back = self._preparation.step_back.has_gone_back
        return {(name,): has_gone_back(name, alias) for name, alias in self.aliases().items()}

    def sleeping(self) -> list[ModelDescription]:
        """The models without workers that start when they are requested. Nothing is known of them
        but their names: their lengths are 0."""
        names = self._config.model if self._config.idle_timeout_s else ()
        served = {model.name for model in self.models()}
        return [ModelDescription(name, "", 0, 0, ()) for name in names if name not in served]

    def all_models(self) -> list[ModelDescription]:
        """All models that can be requested now, for whatever task."""
        return self.models() + self.sleeping() + self._preparation.encode_models()

    def ready(self) -> bool:
        """Whether requests should be sent here: they would be accepted and could be answered
        now."""
        fleet, starts = self._fleet, bool(self._config.idle_timeout_s)
        return not self._leaving and (fleet.starts_models if starts else fleet.ready)

    def turn_away(self, tenant: Tenant, priority: int) -> None:
        """Raises BatonError when any request of the tenant would be refused now, so that this one
        need not be read. priority: the most urgent that the request may have."""
        self._check_open()
        self.gate.precheck(tenant, priority)

    def receive(self, tenant: Tenant, size: int) -> Holding:
        """Reserves room for this many bytes of a tenant's request, which the caller releases. It
        comes first on every route, if possible before the bytes are read. Raises BatonError."""
        self._check_open()
        return self.gate.receive(tenant, size)

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """Wraps the code that reads a request. A request that cannot be read is the client's fault
        and counts as one."""
        try:
            yield
        except Refusal:
            raise
        except Exception:
            self.gate.fault(tenant)
            raise

    async def open(self, request: Request, holding: Holding | None = None) -> EventStream:
        """Starts a request; returns when its first attempt has workers. Raises BatonError when the
        request is refused or fails earlier; it then holds nothing.

        holding: the room of its bytes, which this request takes over; None: it is reserved here.
        The caller closes the stream, also when the client is gone.
        """
        arrival = asyncio.get_running_loop().time()
        name = request.model or next(iter(self._config.model), "")
        alias = self.aliases().get(name)
        if alias is not None and alias.cascade is not None:
            if request.resumable:
                raise InvalidArgument(
                    "A stream cannot be resumed where either of two models may have answered.",
                    field="resumable",
                )
            return await self._cascades.open(name, alias, request, holding, arrival)
        return await self.run_here(request, holding, arrival)

    async def run_here(
        self,
        request: Request,
        holding: Holding | None,
        arrival: float,
        *,
        alias: str = "",
        asked: Request | None = None,
    ) -> FleetStream:
        """Starts a request on this router's workers; see `open`. arrival: when it came, on the
        running loop's clock. alias: the name whose second stage it is. asked: see FleetStream."""
        loop = asyncio.get_running_loop()
        context = self._begin(request, arrival, holding)
        context.alias = alias
        stages = context.stages
        try:
            made = await self._in_time(context, self._preparation.prepare)
        except BaseException as failure:
            self._end(context, failure)
            raise
        runner = made.runner
        shadow: ShadowRun | None = None

        def adopted() -> None:
            self._keep(self.kept.leave(request.tenant, context.stream_id))

        runner.on_adopted = adopted

        def observe_first_token() -> None:
            stages.first_text_ready()
            self._metrics.first_token(request.tenant, loop.time() - arrival)

        def ended(task: asyncio.Task[None]) -> None:
            self._runners.discard(runner)
            self._metrics.request_s.observe(loop.time() - arrival)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if stages.record is not None:
                stages.record.runs_on(runner.model)
            self._end(context, error, runner.model.name, runner.state.logs, runner.cached_tokens)
            if shadow is not None:
                logs = runner.state.logs
                shadow.ended(None if error else tuple(log.token_ids(0) for log in logs))

        task = self._keep(runner.run())
        self._runners.add(runner)
        task.add_done_callback(ended)
        if self._cut:
            runner.fail(left())
        stream = FleetStream(runner, task, made, observe_first_token, asked)
        try:
            await context.placed.wait()
            if not context.was_placed and task.cancelled():
                raise left()
            if not context.was_placed:
                task.result()
        except BaseException as failure:
            if isinstance(failure, Refusal):
                self._metrics.refused(failure.limit, request.tenant)
            await stream.aclose()
            raise
        named = self.aliases().get(context.alias) if not alias else None
        if named is not None and named.shadow is not None and not (task.done() or self._leaving):
            seed, busy = made.accepted.seed, len(self.gate.queue) > 0
            shadow = self._shadows.begin(
                context.alias, named.shadow, request, seed, runner.model, busy=busy
            )
        return stream

    async def forward(
        self,
        cascade: Cascade,
        request: Request,
        holding: Holding | None,
        arrival: float,
        alias: str,
    ) -> EventStream:
        """Starts a request at a cascade's upstream; see `run_here`. It is admitted, charged and
        counted as any other one."""
        upstream, model, loop = cascade.upstream, cascade.model, asyncio.get_running_loop()
        assert upstream is not None
        context = self._begin(request, arrival, holding, elsewhere=True)
        context.alias = alias
        try:
            accepted, stream = await self._in_time(
                context, lambda it: self._upstreams.open(upstream, model, request, it.deadline)
            )
        except BaseException as failure:
            self._end(context, failure)
            raise
        try:
            context.charge.encoded(accepted.prompt_tokens)
            usual = context.controller.admission.usual_output
            stop = StopParams(max_tokens=request.max_tokens or usual)
            context.controller.settle(context, accepted.prompt_tokens, stop, model)
        except BaseException as failure:
            self._end(context, failure)
            await stream.aclose()
            raise
        stages = context.stages
        stages.trace.accepted(accepted)
        if stages.record is not None:
            stages.record.accepted(model, accepted.prompt_tokens, stop)
        self._metrics.accepted(request.tenant, model, accepted.prompt_tokens)
        context.on_placed()

        def observe_first_token() -> None:
            stages.first_text_ready()
            self._metrics.first_token(request.tenant, loop.time() - arrival)

        def over(error: BaseException | None) -> None:
            self._forwarded.discard(stream)
            self._metrics.request_s.observe(loop.time() - arrival)
            self._end(context, error, model, stream.logs, stream.cached_tokens)

        stream.on_first_token, stream.on_over = observe_first_token, over
        self._forwarded.add(stream)
        if self._cut:
            stream.fail(left())
        return stream

    async def _in_time(
        self, context: RequestContext, work: Callable[[RequestContext], Awaitable[T]]
    ) -> T:
        """Runs a part of a request that ends at its deadline, and when the router leaves. Raises
        BatonError."""
        try:
            async with asyncio.timeout_at(context.deadline) as preparing:
                self._preparing.add(preparing)
                try:
                    return await work(context)
                finally:
                    self._preparing.discard(preparing)
        except TimeoutError:
            if self._cut:
                raise left() from None
            raise DeadlineExceeded("The request ran out of time.") from None

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """Returns the record of an admitted request: the tenant's own, or any for an operator.
        Raises NotFound."""
        return self.records.find(request_id, tenant)

    async def tokenize(
        self,
        request: Request,
        holding: Holding | None = None,
        on_names: Callable[[Sequence[str]], None] | None = None,
    ) -> tuple[EncodedPrompt, ModelDescription]:
        """Returns a request's prompt as tokens, and the model. on_names: receives the tokens' names
        in the vocabulary, in parts. holding: the room of the request's bytes, which stays the
        caller's, because such an answer is larger than its request. Raises BatonError."""

        return await self._text_only(
            request, holding, lambda context: self._preparation.tokenize(context, on_names)
        )

    async def detokenize(self, request: Request, holding: Holding | None = None) -> str:
        """Returns the text of a request's TokenPrompt, including special tokens. holding: as in
        `tokenize`. Raises BatonError."""
        return await self._text_only(request, holding, self._preparation.detokenize)

    async def vectors(self, request: Request, holding: Holding | None = None) -> Vectors:
        """Returns the vectors or scores of a request's VectorPrompt. holding: as in `tokenize`.
        Raises BatonError."""
        error: BaseException | None = None
        own = holding and holding.none()
        arrival = asyncio.get_running_loop().time()
        context = self._begin(request, arrival, own, generates=False)
        try:
            return await self._in_time(context, self._preparation.vectors)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._end(context, error)

    async def _text_only(
        self,
        request: Request,
        holding: Holding | None,
        work: Callable[[RequestContext], Awaitable[T]],
    ) -> T:
        """Runs a request that needs only a tokenizer; it is admitted as others are."""
        error: BaseException | None = None
        with self.reading(request.tenant):
            validate(request)
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        stages, own = StageTimer(now()), holding and holding.none()
        context = self._admit(request, stages, deadline, own, generates=False, elsewhere=False)
        try:
            return await self._in_time(context, work)
        except BaseException as failure:
            error = failure
            raise
        finally:
            context.release(0, error)
            self._release_one()
            self._metrics.ended(error, request.tenant)

    def leave(self) -> None:
        """Reports not ready from now on; requests are still accepted, because clients may not have
        noticed."""
        self._leaving = True
        self._shadows.drop()

    async def drain(self) -> None:
        """Stops accepting requests; returns when the running ones have ended."""
        self.leave()
        self.draining = True
        self.kept.drain()
        await self._idle.wait()

    def cut(self) -> None:
        """Ends all running requests with a retryable error. Streams may go on at another router."""
        self._shadows.drop()
        self._leaving = self.draining = self._cut = True
        for preparing in self._preparing:
            preparing.reschedule(asyncio.get_running_loop().time())
        for runner in self._runners:
            runner.leave(left())
        for stream in self._forwarded:
            stream.fail(left())

    async def close(self) -> None:
        """Cancels all running requests."""
        self.cut()
        self.kept.close()
        await self._shadows.close()
        for stream in [*self._forwarded]:
            await stream.aclose()
        await self._upstreams.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.services.deferred_calls.close()
        await self._preparation.close()
        await self.adapter_manager.close()
        await self.gate.close()

    def _check_open(self) -> None:
        if self.draining:
            raise left()

    def _begin(
        self,
        request: Request,
        arrival: float,
        holding: Holding | None,
        *,
        generates: bool = True,
        elsewhere: bool = False,
    ) -> RequestContext:
        """Validates and admits a request that came at `arrival`, and begins its record and its
        trace. Raises BatonError for one that is refused, which then holds nothing."""
        began = now()
        stages = StageTimer(began, trace_of(self._tracer, request, began))
        try:
            with self.reading(request.tenant):
                validate(request)
            deadline = arrival + (request.deadline_s or self._config.request_timeout_s)
            context = self._admit(
                request, stages, deadline, holding, generates=generates, elsewhere=elsewhere
            )
        except BaseException as refusal:
            stages.over(refusal)
            self._metrics.over(request, "", refusal, stages.times())
            raise
        self.records.begin(request, context.request_id, stages)
        return context

    def _admit(
        self,
        request: Request,
        stages: StageTimer,
        deadline: float,
        holding: Holding | None,
        *,
        generates: bool,
        elsewhere: bool,
    ) -> RequestContext:
        self._check_open()
        context = self.gate.open(
            request, stages, deadline, holding, generates=generates, elsewhere=elsewhere
        )
        self._num_requests += 1
        self._idle.clear()
        return context

    def _end(
        self,
        context: RequestContext,
        error: BaseException | None,
        model: str = "",
        logs: Sequence[TokenLog] = (),
        cached_tokens: int = 0,
    ) -> None:
        """Ends the request. model: the name of the one that ran it; "" when it was never ready to
        run. logs: of its choices."""
        stages, tenant = context.stages, context.request.tenant
        num_tokens = sum(map(len, logs))
        context.release(num_tokens, error)
        if isinstance(error, BatonError):
            error.request_id = context.request_id
        stages.over(error, logs, cached_tokens)
        self.records.end(stages)
        self._release_one()
        times = stages.times()
        self._metrics.spent(tenant, times, num_tokens)
        if context.adapter:
            self._metrics.adapter_over(context.adapter, num_tokens, error)
        self._metrics.over(context.request, model, error, times, logs, context.alias)
        self._metrics.ended(error, tenant)
        if not (isinstance(error, Refusal) or is_clients_fault(error, context.request)):
            self._metrics.judged(tenant, error, times, logs)
            if context.alias and model:
                first_token_s = times.first_token_s if error is None and num_tokens else None
                self._judge_alias(context, model, Outcome(error is not None, first_token_s))

    def _judge_alias(self, context: RequestContext, model: str, outcome: Outcome) -> None:
        """Takes back a change of a name's weights where the request's model does badly."""
        why = self._preparation.step_back.ended(context.alias, model, outcome)
        if why:
            self._metrics.steps_back.labels(context.alias, model).inc()
            about = named(context.request_id, context.stages.trace.context.trace_id)
            text = "%s goes back to its former weights on this router: %s"
            log.error(text, context.alias, why, extra=about)

    def _release_one(self) -> None:
        self._num_requests -= 1
        if self._num_requests == 0:
            self._idle.set()

    def _keep(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
