"""The whole journey of one request, top to bottom; the only place that starts one.

is there room for its bytes → is anything let in → validate → is it let in → prepare (see
`preparation`) → relay (its turn, attempts on prefill and decode, tokens to text) → events.
Knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from baton.core.admission import Holding
from baton.core.errors import BatonError, DeadlineExceeded
from baton.core.model import ModelDescription
from baton.core.pace import Pace
from baton.core.refusal import Refusal
from baton.core.request import Request
from baton.core.request_record import RequestRecord
from baton.core.tenants import Tenant
from baton.core.validation import validate
from baton.router.config import RouterConfig
from baton.router.event_stream import EventStream, left
from baton.router.fleet import Fleet
from baton.router.gate import Gate, Pass
from baton.router.guards import Guards
from baton.router.later import Later
from baton.router.metrics import RouterMetrics
from baton.router.preparation import Preparation, new_id
from baton.router.records import Records, UsageSink
from baton.router.relay import Relay
from baton.router.request_trace import trace_of
from baton.router.stage_timer import StageTimer
from baton.router.tokenizer_client import Encoded
from baton.router.told import Told
from baton.rpc.tracing import OFF, Tracer, now

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
        self.gate = Gate(fleet, config, metrics, live_replicas)
        self.records = Records(config, usage)
        self.pace = Pace(config.coalesce_above_cores)
        self._later = Later()
        self._guards = Guards.of(config)
        self._preparation = Preparation(
            fleet,
            config,
            metrics,
            self.gate.turnstile,
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
        self._relays: set[Relay] = set()
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
        return Counter(relay.model.name for relay in self._relays)

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
            self.gate.glance(tenant, priority)

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

    async def open(self, request: Request, holding: Holding | None = None) -> EventStream | Told:
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
        if made.relay is None:
            self._end(request_id, held, stages, None, model=made.accepted.model)
            return Told(made.accepted, request.n)
        relay = made.relay

        def observe_first_token() -> None:
            stages.text_told()
            self._metrics.first_token(request.tenant, loop.time() - arrival)

        def ended(task: asyncio.Task[None]) -> None:
            self._relays.discard(relay)
            self._metrics.request_s.observe(loop.time() - arrival)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._end(request_id, held, stages, error, relay)

        task = self._keep(relay.run())
        self._relays.add(relay)
        task.add_done_callback(ended)
        if self._cut:
            relay.fail(left())
        stream = EventStream(relay, task, made.accepted, observe_first_token, made.parts)
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
    ) -> tuple[Encoded, ModelDescription]:
        """A request's prompt as tokens, of the model named with them. on_names: gets the tokens'
        names in the vocabulary, some at a time. holding: of its bytes, which stays the caller's: an
        answer of this kind is larger than its request. Raises BatonError."""

        def work(held: Pass) -> Awaitable[tuple[Encoded, ModelDescription]]:
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
        work: Callable[[Pass], Awaitable[T]],
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
        for relay in self._relays:
            relay.fail(left())

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
    ) -> Pass:
        self._check_open()
        with self._counted(request.tenant):
            held = self.gate.open(request, deadline, holding, generates=generates)
        self._num_requests += 1
        self._idle.clear()
        return held

    def _end(
        self,
        request_id: str,
        held: Pass,
        stages: StageTimer,
        error: BaseException | None,
        relay: Relay | None = None,
        model: str = "",
    ) -> None:
        logs = relay.journey.logs if relay is not None else ()
        num_tokens, tenant = sum(map(len, logs)), held.request.tenant
        held.release(num_tokens, error)
        if isinstance(error, BatonError):
            error.request_id = request_id
        if relay is not None and stages.record is not None:
            stages.record.runs_on(relay.model)
        stages.over(error, logs, relay.cached_tokens if relay is not None else 0)
        self.records.end(stages)
        self._release_one()
        times, ran = stages.times(), model if relay is None else relay.model.name
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
