"""The way of one request from top to bottom; the only place that starts one.

room for its bytes → precheck → validate → admit → prepare (`preparation`) → RequestRunner
(`runner`: its turn, attempts on prefill and decode, tokens to text) → EventStream
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from baton.core.admission.admission import Holding
from baton.core.admission.tenant_budgets import Refusal
from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, DeadlineExceeded, Unavailable
from baton.core.observe.request_record import RequestRecord
from baton.core.request.answers import AnswerDeltas
from baton.core.request.model import ModelDescription
from baton.core.request.request import Accepted, Delta, Event, Finished, FinishReason, Request
from baton.core.request.validation import validate
from baton.router.config import RouterConfig
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.records import Records, UsageSink
from baton.router.observe.stage_timer import StageTimer, trace_of
from baton.router.request.admission import AdmissionController, Permit
from baton.router.request.guards import Guards
from baton.router.request.pacing import DeferredCalls, LoadMonitor
from baton.router.request.preparation import Preparation, new_id
from baton.router.request.runner import RequestRunner
from baton.router.workers.clients import EncodedPrompt
from baton.router.workers.fleet import Fleet
from baton.rpc.tracing import OFF, Tracer, now


def left() -> BatonError:
    """What a request ends with, or is refused with, because its router leaves."""
    return Unavailable("This router is leaving.", retry_after_s=1.0)


class EventStream(AsyncIterator[Event]):
    """Owns the runner's task. parts: what each choice's deltas are put through; empty: nothing.
    `aclose` may be called at any time, and more than once."""

    def __init__(
        self,
        runner: RequestRunner,
        task: asyncio.Task[None],
        accepted: Accepted,
        on_first_token: Callable[[], None],
        parts: Sequence[AnswerDeltas] = (),
    ) -> None:
        self._runner = runner
        self._task = task
        self._events: deque[Event] = deque([accepted])
        self._on_first_token = on_first_token
        self._parts = parts
        self._began = False
        self._ended = False

    async def __anext__(self) -> Event:
        """Raises BatonError when the request failed; what came before it has been told."""
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
                return self._runner.finished(reasoning_tokens)
            await self._runner.news.wait()
            early_s = self._runner.asking.early_s
            if early_s > 0:
                # Lets more tokens come for the next event; the end of an answer does not wait.
                await asyncio.wait((self._task,), timeout=early_s)
        return self._events.popleft()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in a prefix cache, known with its first
        token."""
        return self._runner.cached_tokens

    def call_off(self) -> None:
        """Ends the request if it still runs: what is there is told, and then Cancelled raised."""
        self._runner.cancel()

    async def aclose(self) -> None:
        """Ends the request if it still runs; returns when all that it held is given back."""
        self._ended = True
        self._events.clear()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _raise_failure(self) -> None:
        """Of a task that is over."""
        if self._task.cancelled():
            # By the router, which closes: whoever reads ends its request by `aclose`.
            error = left()
            error.request_id = self._runner.request_state.request_id
            raise error
        try:
            self._task.result()
        except BatonError as error:
            error.request_id = self._runner.request_state.request_id
            raise

    def _collect(self) -> bool:
        """Takes what every choice has that was not told yet."""
        for text in self._runner.texts.choices:
            delta = text.take_delta()
            if delta is not None:
                parts = self._parts
                self._events.append(parts[delta.choice].of(delta) if parts else delta)
        if not self._events:
            return False
        self._runner.asking.told()
        if not self._began:
            self._began = True
            self._on_first_token()
        return True


class EmptyStream(AsyncIterator[Event]):
    """Of a request that generates nothing: every choice has reached its length."""

    cached_tokens: Final = 0

    def __init__(self, accepted: Accepted, n: int) -> None:
        ends = [Delta(choice, finish_reason=FinishReason.LENGTH) for choice in range(n)]
        finished = Finished(accepted.prompt_tokens, 0, 0)
        self._events: deque[Event] = deque((accepted, *ends, finished))

    async def __anext__(self) -> Event:
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    def call_off(self) -> None:
        """Nothing runs that could be."""

    async def aclose(self) -> None:
        self._events.clear()


T = TypeVar("T")


class Pipeline:
    """Runs requests on a fleet. The fleet is started and closed by whoever made it.

    live_replicas: routers that share tenants' limits, this one among them.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        live_replicas: Callable[[], int] = lambda: 1,
        tracer: Tracer = OFF,
        usage: UsageSink | None = None,
    ) -> None:
        self._fleet = fleet
        self._tracer = tracer
        self._config = config
        self._metrics = metrics
        self.gate = AdmissionController(fleet, config, metrics, live_replicas)
        self.records = Records(config, usage)
        self.pace = LoadMonitor(config.coalesce_above_cores)
        self._later = DeferredCalls()
        self._guards = Guards.of(config)
        self._preparation = Preparation(
            fleet,
            config,
            metrics,
            self.gate.dispatcher,
            self._guards,
            self.pace,
            self._later,
            self._background,
        )
        self._num_requests = 0
        self._leaving = False
        self._draining = False
        self._cut = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._preparing: set[asyncio.Timeout] = set()
        self._runners: set[RequestRunner] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        """Requests that were admitted and have not ended."""
        return self._num_requests

    @property
    def held(self) -> dict[str, int]:
        """What requests hold of this router and count as given to workers, by kind; 0 each when
        there are no requests."""
        pools = (self._fleet.prefills, self._fleet.decodes, self._fleet.detokenizers)
        workers = [worker for pool in pools for worker in pool.workers()]
        return {
            **self.gate.held,
            "placed_sequences": sum(worker.placed_sequences for worker in workers),
            "placed_tokens": sum(worker.placed_tokens for worker in workers),
            "suspects": len(self._guards.quarantine.taken),
        }

    def running_by_model(self) -> Counter[str]:
        """Requests whose prompts are encoded and that have not ended, those that wait for workers
        included."""
        return Counter(runner.model.name for runner in self._runners)

    def models(self) -> list[ModelDescription]:
        """The models that can be asked for now."""
        return self._preparation.models()

    def ready(self) -> bool:
        """Whether requests should be sent here: they would be taken and could be answered now."""
        return not self._leaving and self._fleet.ready

    def turn_away(self, tenant: Tenant, priority: int) -> None:
        """Raises BatonError when nothing that a tenant could ask for now would be taken, so that
        its request need not even be read. priority: as urgent as the request may be."""
        self._check_open()
        with self._counted(tenant):
            self.gate.precheck(tenant, priority)

    def receive(self, tenant: Tenant, size: int) -> Holding:
        """Room for so many bytes of a tenant's request, which the caller releases. It comes first
        on every route: before the bytes are read, where that is still open. Raises BatonError."""
        self._check_open()
        with self._counted(tenant):
            return self.gate.receive(tenant, size)

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """Around what reads a request of a tenant. A request that cannot be read is its client's
        fault, and counts as one all the same."""
        try:
            yield
        except Refusal:
            raise
        except Exception:
            self.gate.fault(tenant)
            raise

    async def open(
        self, request: Request, holding: Holding | None = None
    ) -> EventStream | EmptyStream:
        """Starts a request; returns when its first attempt has workers. Raises BatonError when it
        is refused or fails before; nothing then remains of it.

        holding: of its bytes, this request's from now on; None: it is asked for here. The caller
        closes the stream, also when the client is gone.
        """
        loop = asyncio.get_running_loop()
        arrival, began = loop.time(), now()
        stages = StageTimer(began, trace_of(self._tracer, request, began))
        try:
            with self.reading(request.tenant):
                validate(request)
            deadline = arrival + (request.deadline_s or self._config.request_timeout_s)
            held = self._admit(request, deadline, holding)
        except BaseException as refusal:
            stages.over(refusal)
            self._metrics.over(request, "", refusal, stages.times())
            raise
        request_id = new_id()
        self.records.begin(request, request_id, stages)
        try:
            async with asyncio.timeout_at(deadline) as preparing:
                self._preparing.add(preparing)
                try:
                    made = await self._preparation.prepare(request, request_id, held, stages)
                finally:
                    self._preparing.discard(preparing)
        except TimeoutError:
            error = left() if self._cut else DeadlineExceeded("The request ran out of time.")
            self._end(request_id, held, stages, error)
            raise error from None
        except BaseException as failure:
            self._end(request_id, held, stages, failure)
            raise
        if made.runner is None:
            self._end(request_id, held, stages, None, model=made.accepted.model)
            return EmptyStream(made.accepted, request.n)
        runner = made.runner

        def observe_first_token() -> None:
            stages.text_told()
            self._metrics.first_token(request.tenant, loop.time() - arrival)

        def ended(task: asyncio.Task[None]) -> None:
            self._runners.discard(runner)
            self._metrics.request_s.observe(loop.time() - arrival)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._end(request_id, held, stages, error, runner)

        task = self._keep(runner.run())
        self._runners.add(runner)
        task.add_done_callback(ended)
        if self._cut:
            runner.fail(left())
        stream = EventStream(runner, task, made.accepted, observe_first_token, made.parts)
        try:
            await held.placed.wait()
            if not held.was_placed and task.cancelled():
                raise left()
            if not held.was_placed:
                task.result()
        except BaseException as failure:
            if isinstance(failure, Refusal):
                self._metrics.refused(failure.limit, request.tenant)
            await stream.aclose()
            raise
        return stream

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """What is remembered of a request that was let in: of a tenant's own, or for an operator of
        anybody's. Raises NotFound."""
        return self.records.find(request_id, tenant)

    async def tokenize(
        self,
        request: Request,
        holding: Holding | None = None,
        on_names: Callable[[Sequence[str]], None] | None = None,
    ) -> tuple[EncodedPrompt, ModelDescription]:
        """A request's prompt as tokens, of the model named with them. on_names: gets the tokens'
        names in the vocabulary, some at a time. holding: of its bytes, which stays the caller's: an
        answer of this kind is larger than its request. Raises BatonError."""

        def work(held: Permit) -> Awaitable[tuple[EncodedPrompt, ModelDescription]]:
            return self._preparation.tokenize(held, on_names)

        return await self._text_only(request, holding, work)

    async def detokenize(self, request: Request, holding: Holding | None = None) -> str:
        """The text of a request's TokenPrompt, special tokens included. holding: as above. Raises
        BatonError."""
        return await self._text_only(request, holding, self._preparation.detokenize)

    async def _text_only(
        self,
        request: Request,
        holding: Holding | None,
        work: Callable[[Permit], Awaitable[T]],
    ) -> T:
        """A request that takes no turn and no worker but a tokenizer, let in as others are."""
        error: BaseException | None = None
        with self.reading(request.tenant):
            validate(request)
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        held = self._admit(request, deadline, holding and holding.none(), generates=False)
        try:
            return await work(held)
        except BaseException as failure:
            error = failure
            raise
        finally:
            held.release(0, error)
            self._release_one()
            self._metrics.ended(error, request.tenant)

    def leave(self) -> None:
        """Not ready from now on; requests are still taken, for not everybody knows it yet."""
        self._leaving = True

    async def drain(self) -> None:
        """Takes no new requests; returns when the running ones have ended."""
        self._leaving = self._draining = True
        await self._idle.wait()

    def cut(self) -> None:
        """Ends what still runs, with an error that says to try again elsewhere."""
        self._leaving = self._draining = self._cut = True
        for preparing in self._preparing:
            preparing.reschedule(asyncio.get_running_loop().time())
        for runner in self._runners:
            runner.fail(left())

    async def close(self) -> None:
        """Cancels what still runs."""
        self.cut()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self._later.close()
        await self._preparation.close()
        await self.gate.close()

    def _check_open(self) -> None:
        if self._draining:
            raise left()

    @contextmanager
    def _counted(self, tenant: Tenant) -> Iterator[None]:
        """A request that is refused here ends here."""
        try:
            yield
        except BatonError as error:
            self._metrics.ended(error, tenant)
            raise

    def _admit(
        self,
        request: Request,
        deadline: float,
        holding: Holding | None,
        *,
        generates: bool = True,
    ) -> Permit:
        self._check_open()
        with self._counted(request.tenant):
            held = self.gate.open(request, deadline, holding, generates=generates)
        self._num_requests += 1
        self._idle.clear()
        return held

    def _end(
        self,
        request_id: str,
        held: Permit,
        stages: StageTimer,
        error: BaseException | None,
        runner: RequestRunner | None = None,
        model: str = "",
    ) -> None:
        logs = runner.request_state.logs if runner is not None else ()
        num_tokens, tenant = sum(map(len, logs)), held.request.tenant
        held.release(num_tokens, error)
        if isinstance(error, BatonError):
            error.request_id = request_id
        if runner is not None and stages.record is not None:
            stages.record.runs_on(runner.model)
        stages.over(error, logs, runner.cached_tokens if runner is not None else 0)
        self.records.end(stages)
        self._release_one()
        times, ran = stages.times(), model if runner is None else runner.model.name
        self._metrics.spent(tenant, times, num_tokens)
        self._metrics.over(held.request, ran, error, times, logs)
        self._metrics.ended(error, tenant)

    def _release_one(self) -> None:
        self._num_requests -= 1
        if self._num_requests == 0:
            self._idle.set()

    def _keep(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _background(self, coroutine: Coroutine[None, None, None]) -> None:
        self._keep(coroutine)
