"""Runs attempts on the engine and offers their KV.

A job lives from `run` until token 0 is answered *and*, when its KV is to be handed over, until the
hand-over has ended. What ends it early goes through `_finish`, the one place that gives its blocks
back. What the engine tells about a job that ended here meanwhile is dropped.

Prefill answers for tokens, decode for the hand-over: one that fails is told by decode, and a prompt
that is still being computed then goes on, because its tokens and its cached blocks are of use.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from baton.core.admission.tenant_budgets import UseMeter
from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    Unavailable,
)
from baton.core.kvcache.block_pool import Extents
from baton.core.observe.stages import TraceContext
from baton.core.request.attempt import Attempt, AttemptKey
from baton.core.routing.load import TenantUse, WorkerState
from baton.core.scheduler.events import AttemptFailed, Computed, Event, FirstTokens, Planned
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import CompiledGrammar
from baton.engine.thread import EngineThread
from baton.grammar.book import GrammarBook
from baton.rpc import metrics
from baton.rpc import trace_names as names
from baton.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    prompt_logprobs_to_proto,
)
from baton.rpc.logs import named
from baton.rpc.tracing import OFF, Span, Tracer, ending, error_type, now
from baton.transfer.sender import KvSender, PendingTransfer
from baton.v1 import prefill_pb2, prefill_pb2_grpc

# Counts the decode workers that take KV from here.

LIVE_S = 60.0
MAX_KNOWN = 1024


class LiveReceivers:
    """Decode workers by instance id and when each was named last, in seconds of one clock."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()

    def saw(self, instance_id: str, now: float) -> int:
        """A decode worker will collect. Returns how many were named within the last minute."""
        self._seen[instance_id] = now
        self._seen.move_to_end(instance_id)
        while len(self._seen) > MAX_KNOWN or next(iter(self._seen.values())) < now - LIVE_S:
            self._seen.popitem(last=False)
        return len(self._seen)


PREFILLED = metrics.counter(metrics.PREFILL_TOKENS)
CACHED = metrics.counter(metrics.CACHED_TOKENS)
STAGE_TIME = metrics.histogram(metrics.STAGE_TIME)

DEFAULT_DEADLINE_S = 600.0
MAX_ATTEMPTS = 4096
MAX_CALLED_OFF = 1024


@dataclass(slots=True)
class Job:
    """One attempt here. router: the instance id that asked. first: resolves with token 0. offer:
    None when nothing is given (any more).

    extents: where its KV lies. packing: whether some of it is being copied. over: it has ended; its
    blocks are given back as soon as nothing is copied. counted: positions that are in the metrics.
    span: until token 0 is answered.
    """

    attempt: Attempt
    router: str
    first: asyncio.Future[FirstTokens]
    span: Span
    offer: PendingTransfer | None = None
    extents: Extents = ()
    packing: bool = False
    over: bool = False
    counted: int = 0


class PrefillService:
    """Prefill's business between the wire and the engine thread. Lives on the event loop.

    handover_timeout_s: for a whole hand-over, the prompt's queueing and computing included.
    """

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float,
        tracer: Tracer = OFF,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._grammars = grammars
        self._handover_timeout_s = handover_timeout_s
        self._tracer = tracer
        self._receivers = LiveReceivers()
        self._meter = UseMeter()
        self._jobs: dict[AttemptKey, Job] = {}
        self._called_off: OrderedDict[AttemptKey, None] = OrderedDict()
        """Attempts that were not here when they were cancelled: a cancel may overtake its run."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._draining = False
        self._empty = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        if not self._draining:
            return WorkerState.SERVING
        computing = any(not job.first.done() for job in self._jobs.values())
        return WorkerState.DRAINING if computing else WorkerState.KV_ONLY

    @property
    def num_attempts(self) -> int:
        return len(self._jobs)

    @property
    def holdings(self) -> dict[str, int]:
        """What is held here for attempts besides blocks and buffers, by kind."""
        return {**self._sender.holdings, "tasks": len(self._watchers)}

    @property
    def probing(self) -> bool:
        return self._sender.probing

    def use_through(self, router_instance_id: str) -> tuple[TenantUse, ...]:
        """What tenants use here through other routers than this one, in requests of which no
        decode worker knows."""
        here = ((job.router, job.attempt) for job in self._jobs.values() if job.offer is None)
        return self._meter.others(router_instance_id, here)

    async def run(
        self, attempt: Attempt, handover_id: bytes, decode_instance_id: str, router: str = ""
    ) -> FirstTokens:
        """Computes the input's KV and token 0 of every choice, for the router of an instance id.

        With a handover_id the KV then stays until it is collected or its deadline passes. Raises
        Unavailable when draining, InvalidArgument, Overloaded, DeadlineExceeded, Cancelled.
        """
        if self._draining:
            raise Unavailable("this prefill worker is draining")
        if attempt.key in self._called_off:
            raise Cancelled("cancelled before it came")
        if attempt.key in self._jobs:
            raise InvalidArgument("this attempt already runs here", field="attempt")
        if len(self._jobs) >= MAX_ATTEMPTS:
            raise Overloaded("too many attempts are on this prefill worker", retry_after_s=1.0)
        span = self._tracer.go_on(names.PREFILL_RUN, parent=TraceContext(attempt.traceparent))
        with ending(span):
            job = Job(attempt, router, asyncio.get_running_loop().create_future(), span)
            return await self._run(job, handover_id, decode_instance_id)

    async def _run(self, job: Job, handover_id: bytes, decode_instance_id: str) -> FirstTokens:
        attempt, router = job.attempt, job.router
        self._jobs[attempt.key] = job
        try:
            async with asyncio.timeout(attempt.remaining_s or DEFAULT_DEADLINE_S):
                if handover_id:
                    self._offer(job, handover_id, decode_instance_id)
                grammar = await self._grammars.compiled(attempt.grammar)
                await self._queue(attempt, bool(handover_id), decode_instance_id, grammar)
                first = await asyncio.shield(job.first)
        except TimeoutError:
            error = DeadlineExceeded("the request ran out of time in prefill")
            self._finish(job, error)
            raise error from None
        except BatonError as error:
            self._finish(job, error)
            raise
        except BaseException:
            self._finish(job, Cancelled("the router left"))
            raise
        if job.offer is None:
            self._forget(job)
        if not handover_id:
            self._meter.began(router, attempt)
            self._meter.made(router, attempt, len(attempt.choices))
        return first

    def cancel(self, key: AttemptKey) -> None:
        """Ends an attempt, computing or waiting to be collected. Unknown ones are no error."""
        job = self._jobs.get(key)
        if job is not None:
            self._finish(job, Cancelled("cancelled"))
            return
        self._called_off[key] = None
        if len(self._called_off) > MAX_CALLED_OFF:
            self._called_off.popitem(last=False)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes what one step made. Called on the event loop by the engine thread."""
        # If token 0 ends every choice, nothing is moved: the rest of the KV stays here until the
        # router, told by our answer, calls both legs off.
        firsts = [event for event in events if isinstance(event, FirstTokens)]
        over = {first.key for first in firsts if _is_last(first)}
        for event in events:
            match event:
                case Planned(key, _) | Computed(key) | FirstTokens(key) | AttemptFailed(key):
                    job = self._jobs.get(key)
                    if job is not None:
                        self._take(job, event, may_give=key not in over)
                case _:
                    pass

    async def drain(self) -> None:
        """Takes nothing new and returns when every job is answered and collected."""
        self._draining = True
        self._note_empty()
        await self._empty.wait()

    async def close(self) -> None:
        """Ends everything that is left and returns when no task of ours runs."""
        self._draining = True
        for job in list(self._jobs.values()):
            self._finish(job, Unavailable("this prefill worker is leaving"))
        await self._sender.close()
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    def _take(self, job: Job, event: Event, *, may_give: bool) -> None:
        offer = job.offer
        match event:
            case Planned(_, extents):
                job.extents = extents
                if offer is not None:
                    offer.announce()
            case Computed(_, num_positions, cached):
                self._count(job, num_positions, cached)
                if offer is not None and may_give:
                    offer.advance(num_positions)
            case FirstTokens(_, tokens, _, queue_s, prefill_s):
                STAGE_TIME.labels("prefill_queue").observe(queue_s)
                STAGE_TIME.labels("prefill").observe(prefill_s)
                _tell(job.span, event)
                if not job.first.done():
                    job.first.set_result(event)
                if offer is not None and may_give:
                    offer.tokens(tokens)
            case AttemptFailed(_, _, error):
                self._finish(job, error)
            case _:
                pass

    def _count(self, job: Job, num_positions: int, cached: int) -> None:
        if not job.counted:
            CACHED.inc(cached)
            job.counted = cached
        PREFILLED.inc(num_positions - job.counted)
        job.counted = num_positions

    async def _queue(
        self, attempt: Attempt, keep: bool, receiver: str, grammar: CompiledGrammar | None
    ) -> None:
        now = time.monotonic()
        live = self._receivers.saw(receiver, now) if keep else None

        def add(loop: EngineLoop) -> None:
            if live is not None:
                loop.scheduler.live_receivers = live
            loop.scheduler.add(attempt, now, keep=keep, receiver=receiver, grammar=grammar)

        await self._engine.call(add)

    def _offer(self, job: Job, handover_id: bytes, decode_instance_id: str) -> None:
        key = job.attempt.key

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            if job.over:
                raise Cancelled("cancelled")
            job.packing = True
            try:
                await self._engine.copy(
                    lambda runner: runner.pack(job.extents, first_position, count, out)
                )
            finally:
                job.packing = False
                if job.over:
                    self._give_back(job)

        offer = self._sender.offer(
            handover_id,
            receiver_instance_id=decode_instance_id,
            num_positions=len(job.attempt.token_ids),
            pack=pack,
            deadline_s=min(job.attempt.remaining_s or DEFAULT_DEADLINE_S, self._handover_timeout_s),
            about=named(key.request_id, job.span.context.trace_id),
        )
        offer.on_granted = lambda: self._post(lambda loop: loop.scheduler.grant(key))
        job.offer = offer
        watcher = asyncio.create_task(self._watch(job, offer))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, job: Job, offer: PendingTransfer) -> None:
        """The KV is needed until the hand-over ends, however it ends."""
        with ending(job.span.child(names.GIVE)) as giving:
            outcome = await offer.wait()
            giving.end(error_type(outcome.error))
        job.offer = None
        if job.first.done():
            self._forget(job)
        key = job.attempt.key

        def unpin(loop: EngineLoop) -> None:
            # One that waits for its receiver's share of the pool does not count against it now.
            loop.scheduler.grant(key)
            loop.scheduler.release(key)

        self._post(unpin)

    def _finish(self, job: Job, error: BatonError) -> None:
        """Ends a job early, wherever it stands. Without effect when it has ended."""
        if not self._forget(job):
            return
        if job.offer is not None:
            job.offer.fail(error)
        if not job.first.done():
            job.first.set_exception(error)
            job.first.exception()
        job.over = True
        if not job.packing:
            self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self._post(lambda loop: loop.scheduler.cancel(job.attempt.key))

    def _forget(self, job: Job) -> bool:
        """Whether the job was still here."""
        if self._jobs.get(job.attempt.key) is not job:
            return False
        del self._jobs[job.attempt.key]
        self._note_empty()
        return True

    def _note_empty(self) -> None:
        if self._draining and not self._jobs:
            self._empty.set()

    def _post(self, function: Callable[[EngineLoop], object]) -> None:
        # An engine that has stopped has nothing left to free.
        with suppress(Unavailable):
            self._engine.post(function)


def _is_last(first: FirstTokens) -> bool:
    """Whether no choice goes on after its first token."""
    return all(tokens.finish_reason is not None for tokens in first.tokens)


def _tell(span: Span, first: FirstTokens) -> None:
    """What the time until token 0 went into."""
    if not span.recording:
        return
    end = now()
    begin = end - first.prefill_s
    span.child(names.PREFILL_QUEUE, at=begin - first.queue_s).end(at=begin)
    span.child(names.PREFILL_COMPUTE, at=begin).end(at=end)
    span.tell({names.WORKER_CACHED_TOKENS: first.cached_tokens})


# The gRPC face of prefill: converts, calls, converts.


HANDOVER_ID_BYTES = 16


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves `baton.v1.Prefill` of one instance id."""

    def __init__(self, service: PrefillService, instance_id: str) -> None:
        self._service = service
        self._instance_id = instance_id

    async def Run(
        self,
        request: prefill_pb2.RunRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.RunRequest, prefill_pb2.RunResponse],
    ) -> prefill_pb2.RunResponse:
        if request.prefill_instance_id not in ("", self._instance_id):
            raise Unavailable("this address now belongs to a newer prefill worker")
        if len(request.handover_id) not in (0, HANDOVER_ID_BYTES):
            raise InvalidArgument("must be empty or 16 bytes", field="handover_id")
        if request.handover_id and not request.decode_instance_id:
            raise InvalidArgument("is needed with a handover_id", field="decode_instance_id")
        first = await self._service.run(
            attempt_from_proto(request.attempt),
            request.handover_id,
            request.decode_instance_id,
            request.router_instance_id,
        )
        return prefill_pb2.RunResponse(
            choices=[choice_tokens_to_proto(tokens) for tokens in first.tokens],
            cached_tokens=first.cached_tokens,
            queue_us=round(first.queue_s * 1e6),
            prefill_us=round(first.prefill_s * 1e6),
            prompt_logprobs=prompt_logprobs_to_proto(first.prompt_logprobs),
        )

    async def Cancel(
        self,
        request: prefill_pb2.CancelRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.CancelRequest, prefill_pb2.CancelResponse],
    ) -> prefill_pb2.CancelResponse:
        self._service.cancel(AttemptKey(request.request_id, request.attempt))
        return prefill_pb2.CancelResponse()
