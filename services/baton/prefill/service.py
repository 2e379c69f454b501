"""Runs attempts on the engine and offers their KV; knows neither gRPC nor tensors.

A job lives from `run` until token 0 is answered *and*, when its KV is to be handed over, until the
hand-over has ended. Whatever ends first, the blocks are released in exactly one place: `_finish`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.attempt import Attempt, AttemptKey
from baton.core.errors import BatonError, Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from baton.core.events import Computed, Event, Failed, FirstTokens, Planned
from baton.core.load import WorkerState
from baton.core.prefill_scheduler import PrefillScheduler
from baton.engine.thread import EngineThread
from baton.kv.giver import Giver, Offer

DEFAULT_DEADLINE_S = 600.0


@dataclass(slots=True)
class Job:
    """One attempt here. first: resolves with token 0. offer: None when nothing is given."""

    attempt: Attempt
    first: asyncio.Future[FirstTokens]
    offer: Offer | None = None
    watcher: asyncio.Task[None] | None = None


class PrefillService:
    """Prefill's business between the wire and the engine thread. Lives on the event loop."""

    def __init__(
        self,
        engine: EngineThread[PrefillScheduler],
        giver: Giver,
        *,
        handover_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._giver = giver
        self._handover_timeout_s = handover_timeout_s
        self._jobs: dict[AttemptKey, Job] = {}
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

    async def run(
        self, attempt: Attempt, handover_id: bytes, decode_incarnation: str
    ) -> FirstTokens:
        """Computes the input's KV and token 0 of every choice.

        With a handover_id the KV then stays until it is collected or its deadline passes. Raises
        Unavailable when draining, Overloaded, ContextLengthExceeded, DeadlineExceeded, Cancelled.
        """
        if self._draining:
            raise Unavailable("this prefill worker is draining")
        if attempt.key in self._jobs:
            raise InvalidArgument("this attempt already runs here", field="attempt")
        job = Job(attempt, asyncio.get_running_loop().create_future())
        self._jobs[attempt.key] = job
        try:
            if handover_id:
                job.offer = self._offer(job, handover_id, decode_incarnation)
            now = time.monotonic()
            await self._engine.call(
                lambda loop: loop.scheduler.add(
                    attempt, now, keep=bool(handover_id), collector=decode_incarnation
                )
            )
            async with asyncio.timeout(attempt.remaining_s or DEFAULT_DEADLINE_S):
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
            self._finish(job, None)
        return first

    def cancel(self, key: AttemptKey) -> None:
        """Ends an attempt, computing or waiting to be collected. Unknown ones are no error."""
        job = self._jobs.get(key)
        if job is not None:
            self._finish(job, Cancelled("cancelled"))

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes what one step made. Called on the event loop by the engine thread."""
        for event in events:
            match event:
                case Planned(key) if (offer := self._offer_of(key)) is not None:
                    offer.announce()
                case Computed(key, num_positions) if (offer := self._offer_of(key)) is not None:
                    offer.advance(num_positions)
                case FirstTokens(key, tokens):
                    job = self._jobs.get(key)
                    if job is None:
                        continue
                    if not job.first.done():
                        job.first.set_result(event)
                    if job.offer is not None:
                        job.offer.tokens(tokens)
                case Failed(key, _, error):
                    job = self._jobs.get(key)
                    if job is not None:
                        self._finish(job, error)
                case _:
                    pass

    async def drain(self) -> None:
        """Takes nothing new and returns when every job is answered and collected."""
        self._draining = True
        self._note_empty()
        await self._empty.wait()

    async def close(self) -> None:
        for job in list(self._jobs.values()):
            self._finish(job, Unavailable("this prefill worker is leaving"))

    def _offer(self, job: Job, handover_id: bytes, decode_incarnation: str) -> Offer:
        key = job.attempt.key

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            await self._engine.call_to_end(
                lambda loop: loop.runner.pack(
                    loop.scheduler.extents(key), first_position, count, out
                )
            )

        offer = self._giver.offer(
            handover_id,
            collector_incarnation=decode_incarnation,
            num_positions=len(job.attempt.token_ids),
            pack=pack,
            deadline_s=min(job.attempt.remaining_s or DEFAULT_DEADLINE_S, self._handover_timeout_s),
        )
        offer.on_granted = lambda: self._engine.post(lambda loop: loop.scheduler.grant(key))
        job.watcher = asyncio.create_task(self._watch(job, offer))
        return offer

    async def _watch(self, job: Job, offer: Offer) -> None:
        outcome = await offer.wait()
        self._finish(job, outcome.error or Cancelled("the KV was collected before token 0"))

    def _note_empty(self) -> None:
        if self._draining and not self._jobs:
            self._empty.set()

    def _offer_of(self, key: AttemptKey) -> Offer | None:
        job = self._jobs.get(key)
        return None if job is None else job.offer

    def _finish(self, job: Job, error: BatonError | None) -> None:
        """The one place where a job ends. Idempotent."""
        if self._jobs.pop(job.attempt.key, None) is None:
            return
        self._note_empty()
        key, computing = job.attempt.key, not job.first.done()
        if job.offer is not None and error is not None:
            job.offer.fail(error)
        if computing and error is not None:
            job.first.set_exception(error)
            job.first.exception()
        if computing:
            self._engine.post(lambda loop: loop.scheduler.cancel(key))
        elif job.offer is not None:
            self._engine.post(lambda loop: loop.scheduler.release(key))
