"""PrefillService, which computes attempts and offers their KV; and its gRPC service."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    Unavailable,
)
from batonlm.core.handover.table import HANDOVER_ID_BYTES
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerState
from batonlm.core.scheduler.events import AttemptFailed, Computed, Event, FirstTokens, Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import CompiledGrammar, KvPayload, ModelRunner
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.rpc import tracing
from batonlm.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    identity_from_proto,
    prompt_logprobs_to_proto,
)
from batonlm.rpc.logs import named
from batonlm.rpc.tracing import OFF, Span, Tracer, ending, error_type, now
from batonlm.transfer.receiver import KvReceiver
from batonlm.transfer.sender import KvSender, PendingTransfer
from batonlm.v1 import prefill_pb2 as pb
from batonlm.v1 import prefill_pb2_grpc
from batonlm.worker.service import (
    CACHED,
    DEFAULT_DEADLINE_S,
    HANDOVER_TIMEOUT_S,
    NOTHING_BROUGHT,
    PREFILLED,
    STAGE_TIME,
    AttemptService,
    BroughtPrefix,
)
from batonlm.worker.tiers.prefix_tiers import PrefixTiers

LIVE_S = 60.0
MAX_KNOWN = 1024
MAX_CANCELLED_EARLY = 1024


class LiveReceivers:
    """Counts the decode workers that fetch KV from this worker."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        """When each was last seen, by instance id, in seconds of the caller's clock."""

    def saw(self, instance_id: str, now: float) -> int:
        """Notes a decode worker; returns how many were seen within the last LIVE_S seconds."""
        self._seen[instance_id] = now
        self._seen.move_to_end(instance_id)
        while len(self._seen) > MAX_KNOWN or next(iter(self._seen.values())) < now - LIVE_S:
            self._seen.popitem(last=False)
        return len(self._seen)


@dataclass(slots=True)
class PrefillAttempt:
    """One attempt on this worker."""

    attempt: Attempt
    router: str
    """The router's instance id."""
    first: asyncio.Future[FirstTokens]
    """Resolves with token 0 of every choice."""
    span: Span
    """Lasts until token 0 is answered."""
    offer: PendingTransfer | None = None
    """The hand-over; None without one, or when it has ended."""
    extents: Extents = ()
    """The blocks of its KV."""
    packing: bool = False
    """Whether some of its KV is being copied."""
    over: bool = False
    """Whether it was ended early; its blocks are freed as soon as no copy runs."""
    counted: int = 0
    """Positions that the metrics include."""
    prefix_sender: WorkerIdentity | None = None
    """The worker whose cache has the beginning of its input."""
    brought: BroughtPrefix = NOTHING_BROUGHT
    """What came of that and from tiers, once it is known."""


class PrefillService(AttemptService[PrefillAttempt]):
    """Computes the input of attempts and token 0 of every choice, and offers the KV.

    An attempt lasts from `run` until token 0 is answered *and* its hand-over, if any, has ended.
    Every early end goes through `_finish`, the only place that frees its blocks.

    The decode worker reports a failed hand-over to the router. The prefill worker then still
    computes the prompt, because its tokens and cached blocks remain useful.
    """

    role = "prefill"

    def __init__(
        self,
        engine: EngineThread,
        sender: KvSender,
        receiver: KvReceiver,
        grammars: GrammarBook,
        *,
        handover_timeout_s: float = HANDOVER_TIMEOUT_S,
        tracer: Tracer = OFF,
        tiers: PrefixTiers | None = None,
    ) -> None:
        super().__init__(
            engine,
            sender,
            receiver,
            grammars,
            handover_timeout_s=handover_timeout_s,
            tracer=tracer,
            tiers=tiers,
        )
        self._receivers = LiveReceivers()
        self._cancelled_early: OrderedDict[AttemptKey, None] = OrderedDict()
        """Attempts whose cancel arrived before their run: a cancel may overtake it."""

    @property
    def state(self) -> WorkerState:
        if not self._draining:
            return WorkerState.SERVING
        computing = any(not running.first.done() for running in self.attempts.values())
        return WorkerState.DRAINING if computing else WorkerState.KV_ONLY

    async def run(
        self,
        attempt: Attempt,
        handover_id: bytes,
        decode_instance_id: str,
        router: str = "",
        prefix_sender: WorkerIdentity | None = None,
    ) -> tuple[FirstTokens, BroughtPrefix]:
        """Computes the input's KV and token 0 of every choice, behind what comes from tiers and
        prefix_sender's cache; returns what came, too. router: its instance id.

        With a handover_id the KV is kept until the decode worker has it or its deadline passes.
        Raises Unavailable when draining, InvalidArgument, Overloaded, DeadlineExceeded, Cancelled.
        """
        if attempt.key in self._cancelled_early and not self._draining:
            raise Cancelled("cancelled before it came")
        if (refusal := self._refusal(attempt.key)) is not None:
            raise refusal
        span = self._tracer.go_on(tracing.PREFILL_RUN, parent=TraceContext(attempt.traceparent))
        first = asyncio.get_running_loop().create_future()
        running = self.attempts[attempt.key] = PrefillAttempt(
            attempt, router, first, span, prefix_sender=prefix_sender
        )
        with ending(span):
            tokens = await self._run(running, handover_id, decode_instance_id)
        return tokens, running.brought

    def cancel(self, key: AttemptKey) -> None:
        """Ends an attempt, even during its hand-over. An unknown attempt is not an error."""
        running = self.attempts.get(key)
        if running is not None:
            self._finish(running, Cancelled("cancelled"))
            return
        self._cancelled_early[key] = None
        if len(self._cancelled_early) > MAX_CANCELLED_EARLY:
            self._cancelled_early.popitem(last=False)

    def deliver(self, events: Sequence[Event]) -> None:
        # If token 0 ends every choice, no more KV is moved. The KV stays until the router has the
        # answer and cancels both phases.
        over = {event.key for event in events if isinstance(event, FirstTokens) and _is_last(event)}
        for event in events:
            match event:
                case Planned(key) | Computed(key) | FirstTokens(key) | AttemptFailed(key):
                    if (running := self.attempts.get(key)) is not None:
                        self._take(running, event, running.offer if key not in over else None)
                case _:
                    pass

    async def close(self) -> None:
        self._draining = True
        for running in list(self.attempts.values()):
            self._finish(running, Unavailable("this prefill worker is leaving"))
        await self._prefixes.close()
        await self._sender.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._receiver.close()
        if self._tiers is not None:
            await self._tiers.close()

    def _in_use(self) -> Iterable[tuple[str, Attempt]]:
        """The attempts without a hand-over; the others count on their decode worker."""
        running = self.attempts.values()
        return ((one.router, one.attempt) for one in running if one.offer is None)

    def _is_empty(self) -> bool:
        return not self.attempts

    async def _run(
        self, running: PrefillAttempt, handover_id: bytes, decode_instance_id: str
    ) -> FirstTokens:
        attempt, began = running.attempt, time.monotonic()
        try:
            async with asyncio.timeout(attempt.remaining_s or DEFAULT_DEADLINE_S):
                if handover_id:
                    self._offer(running, handover_id, decode_instance_id)
                if running.prefix_sender is not None or self._tiers is not None:
                    await self._bring_unless_over(running)
                grammar = await self._grammars.compiled(attempt.grammar)
                if running.over:
                    # Its blocks were freed already; those that it got now would stay.
                    raise Cancelled("cancelled")
                # A hand-over that has ended meanwhile releases nothing any more.
                keep = running.offer is not None
                left = attempt.after(time.monotonic() - began)
                await self._queue(left, keep, decode_instance_id, grammar)
                first = await asyncio.shield(running.first)
        except TimeoutError:
            error = DeadlineExceeded("the request ran out of time in prefill")
            self._finish(running, error)
            raise error from None
        except BatonError as error:
            self._finish(running, error)
            raise
        except BaseException:
            self._finish(running, Cancelled("the router left"))
            raise
        if running.offer is None:
            self._forget(running)
        if not handover_id:
            self._meter.began(running.router, attempt)
            self._meter.made(running.router, attempt, len(attempt.choices))
        return first

    async def _bring_unless_over(self, running: PrefillAttempt) -> None:
        """Returns when the beginning of its input has come into the prefix cache, as far as it
        does, or when the attempt is ended early."""

        async def bring() -> None:
            running.brought = await self._bring_prefix(
                running.attempt, running.prefix_sender, running.span.context.trace_id
            )

        collecting = self._spawn(bring())
        either: tuple[asyncio.Future[Any], ...] = (collecting, running.first)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            collecting.cancel()
            await asyncio.wait({collecting})
        if not collecting.cancelled():
            collecting.result()

    def _take(self, running: PrefillAttempt, event: Event, offer: PendingTransfer | None) -> None:
        """Applies an event. offer: the transfer for KV and tokens; None when nothing is moved."""
        match event:
            case Planned(_, extents):
                running.extents = extents
                if running.offer is not None:
                    running.offer.announce()
            case Computed(_, num_positions, cached):
                if not running.counted:
                    CACHED.inc(cached)
                    running.counted = cached
                PREFILLED.inc(num_positions - running.counted)
                running.counted = num_positions
                if offer is not None:
                    offer.advance(num_positions)
            case FirstTokens(_, tokens, _, queue_s, prefill_s):
                STAGE_TIME.labels("prefill_queue").observe(queue_s)
                STAGE_TIME.labels("prefill").observe(prefill_s)
                _trace(running.span, event)
                if not running.first.done():
                    running.first.set_result(event)
                if offer is not None:
                    offer.tokens(tokens)
            case AttemptFailed(_, _, error):
                self._finish(running, error)
            case _:
                pass

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

    def _offer(self, running: PrefillAttempt, handover_id: bytes, decode_instance_id: str) -> None:
        attempt, size = running.attempt, len(running.attempt.token_ids)

        async def pack(first_position: int, count: int, out: KvPayload) -> None:
            if running.over:
                raise Cancelled("cancelled")

            def copy(runner: ModelRunner) -> None:
                place = runner.layout.place(first_position, size, runner.block_size)
                runner.pack(running.extents, place, count, out)

            running.packing = True
            try:
                await self._engine.copy(copy)
            finally:
                running.packing = False
                if running.over:
                    self._free(running)

        offer = self._sender.offer(
            handover_id,
            receiver_instance_id=decode_instance_id,
            num_positions=size,
            pack=pack,
            deadline_s=min(attempt.remaining_s or DEFAULT_DEADLINE_S, self._handover_timeout_s),
            about=named(attempt.request_id, running.span.context.trace_id),
        )
        offer.on_granted = lambda: self._post(lambda loop: loop.scheduler.grant(attempt.key))
        running.offer = offer
        self._spawn(self._watch(running, offer))

    async def _watch(self, running: PrefillAttempt, offer: PendingTransfer) -> None:
        """Keeps the KV until the hand-over has ended, well or not, then releases it."""
        with ending(running.span.child(tracing.GIVE)) as giving:
            outcome = await offer.wait()
            giving.end(error_type(outcome.error))
        running.offer = None
        if running.first.done():
            self._forget(running)
        key = running.attempt.key

        def unpin(loop: EngineLoop) -> None:
            # Granted first, so that an attempt that still waits for its receiver's share of the
            # pool no longer waits for it.
            loop.scheduler.grant(key)
            loop.scheduler.release(key)

        self._post(unpin)

    def _finish(self, running: PrefillAttempt, error: BatonError) -> None:
        """Ends an attempt early, in any state. Without effect when it has ended."""
        if not self._forget(running):
            return
        if running.offer is not None:
            running.offer.fail(error)
        if not running.first.done():
            running.first.set_exception(error)
            running.first.exception()
        running.over = True
        if not running.packing:
            self._free(running)

    def _free(self, running: PrefillAttempt) -> None:
        self._post(lambda loop: loop.scheduler.cancel(running.attempt.key))

    def _forget(self, running: PrefillAttempt) -> bool:
        """Removes an attempt; returns whether it was present."""
        if self.attempts.get(running.attempt.key) is not running:
            return False
        del self.attempts[running.attempt.key]
        self._note_drained()
        return True


def _is_last(first: FirstTokens) -> bool:
    """Whether every choice ends with its first token."""
    return all(tokens.finish_reason is not None for tokens in first.tokens)


def _trace(span: Span, first: FirstTokens) -> None:
    """Adds spans for queueing and computing, which end with token 0."""
    if not span.recording:
        return
    end = now()
    begin = end - first.prefill_s
    span.child(tracing.PREFILL_QUEUE, at=begin - first.queue_s).end(at=begin)
    span.child(tracing.PREFILL_COMPUTE, at=begin).end(at=end)
    span.set_attributes({tracing.WORKER_CACHED_TOKENS: first.cached_tokens})


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves `baton.v1.Prefill`, and refuses calls for another instance id."""

    def __init__(self, service: PrefillService, instance_id: str) -> None:
        self._service = service
        self._instance_id = instance_id

    async def Run(
        self,
        request: pb.RunRequest,
        context: grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse],
    ) -> pb.RunResponse:
        if request.prefill_instance_id not in ("", self._instance_id):
            raise Unavailable("this address now belongs to a newer prefill worker")
        if len(request.handover_id) not in (0, HANDOVER_ID_BYTES):
            raise InvalidArgument("must be empty or 16 bytes", field="handover_id")
        if request.handover_id and not request.decode_instance_id:
            raise InvalidArgument("is needed with a handover_id", field="decode_instance_id")
        prefix_sender = None
        if request.HasField("prefix_sender"):
            prefix_sender = identity_from_proto(request.prefix_sender)
        first, brought = await self._service.run(
            attempt_from_proto(request.attempt),
            request.handover_id,
            request.decode_instance_id,
            request.router_instance_id,
            prefix_sender,
        )
        return pb.RunResponse(
            choices=[choice_tokens_to_proto(tokens) for tokens in first.tokens],
            cached_tokens=first.cached_tokens,
            queue_us=round(first.queue_s * 1e6),
            prefill_us=round(first.prefill_s * 1e6),
            prompt_logprobs=prompt_logprobs_to_proto(first.prompt_logprobs),
            prefix=brought.collected,
            restored=brought.restored,
        )

    async def Cancel(
        self,
        request: pb.CancelRequest,
        context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelResponse],
    ) -> pb.CancelResponse:
        self._service.cancel(AttemptKey(request.request_id, request.attempt))
        return pb.CancelResponse()
