"""Finds workers for the attempts of one request; attempts wait for their turn at the Dispatcher."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from batonlm.core.admission.fair_queue import Entry
from batonlm.core.errors import BatonError, NotFound, Reason
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request_state import AttemptRun
from batonlm.core.routing.routing import (
    ADOPTS,
    MOVES,
    RETURNS,
    Decision,
    Demand,
    FilterReason,
    decide,
)
from batonlm.router.request.admission import RequestContext, RouterServices
from batonlm.router.request.dispatcher import (
    LOOK_AGAIN_S,
    Blocked,
    PendingAttempt,
    Placement,
    WorkerClass,
)
from batonlm.router.workers.clients import PrefillClient
from batonlm.router.workers.decode_session import DecodeSession, Migration
from batonlm.router.workers.fleet import Worker, passed_over

BUSY_S = 0.1
"""Seconds for which a worker that refused as overloaded is skipped, unless it names a time."""

RETRY_S = 0.25
"""Pause in seconds before a request returns to a decode worker that lost it, which may be the only
one; doubled each time. A prefill worker that lost it is not used again, because decode can prefill
instead."""

MAX_DOUBLINGS = 4


class Placer:
    """Finds workers for the attempts of one request, and skips those on which it failed."""

    def __init__(
        self,
        services: RouterServices,
        context: RequestContext,
        demand: Callable[[AttemptRun], Demand],
        on_placed: Callable[[], None],
    ) -> None:
        """demand: returns what an attempt needs, without the workers to skip. on_placed: called
        whenever an attempt gets workers."""
        self._services = services
        self._fleet = services.fleet
        self._context = context
        self._demand = demand
        self._on_placed = on_placed
        self._policy = services.config.routing
        self._since = asyncio.get_running_loop().time()
        self._failed: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._decode_failures = 0

    async def find(self, run: AttemptRun) -> Placement | None:
        """Returns workers for the attempt, which the caller releases, or None when it is over.

        Raises Refusal when there will be no place in time, NotFound for an adapter that no worker
        has any more, Unavailable or Overloaded when there was none for wait_timeout_s.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._services.config.wait_timeout_s
        while not run.over:
            found = await self._services.dispatcher.wait(self._entry(run, give_up))
            if not isinstance(found, Blocked):
                if found is not None:
                    self._on_placed()
                return found
            now = loop.time()
            adapter = run.attempt.adapter
            if found is Blocked.ITSELF and adapter and not self._fleet.has_adapter(adapter):
                # It made room for others, or was unloaded.
                name = self._context.adapter
                if not self._services.adapters.returns(name, self._demand(run).model, adapter):
                    raise NotFound("The adapter of this request was unloaded.", field="model")
            if now >= give_up:
                raise self._fleet.decodes.absent(model=True)
            # Breakers and quarantine have no known end.
            ends = [*self._failed.values(), *self._busy.values(), give_up, now + LOOK_AGAIN_S]
            await self._fleet.changed.wait(max(0.001, min(ends) - now))
        return None

    def _entry(self, run: AttemptRun, give_up: float) -> Entry[PendingAttempt]:
        """Builds the queue entry. Only a request's first attempt waits its turn; later ones have
        had it."""
        request, demand = self._context.request, self._demand(run)
        resumed = run.attempt.attempt > 0
        again = demand.input_tokens if run.attempt.position else 0
        # One of a class of its own may overtake those that wait for the same workers.
        everywhere = demand.adapter and self._fleet.all_have_adapter(
            demand.model_digest, demand.adapter
        )
        pending_attempt = PendingAttempt(
            find=lambda full: self._find(run, full),
            over=lambda: run.over,
            kind=WorkerClass(
                demand.model,
                demand.needs_decode,
                demand.input_tokens <= self._policy.short,
                "" if everywhere else demand.adapter,
            ),
            input_tokens=demand.input_tokens,
            choices=demand.choices,
            give_up=give_up,
            future=asyncio.get_running_loop().create_future(),
        )
        return Entry(
            pending_attempt,
            request.tenant.name,
            request.tenant.weight,
            request.priority,
            again if resumed else self._context.charge.cost,
            arrived=self._since,
            deadline=self._context.deadline,
            resumed=resumed,
            group=demand.model,
        )

    def _find(self, run: AttemptRun, full: frozenset[str]) -> Placement | Blocked:
        now = asyncio.get_running_loop().time()
        demand = self._now_demanded(run, now)
        decodes = self._fleet.decodes.view(demand.prefix_hashes)
        decision = decide(
            replace(demand, busy=demand.busy | full),
            self._fleet.prefills.view(demand.prefix_hashes),
            decodes,
            self._policy,
            now,
        )
        self._fleet.log_unpaired(decision)
        if not decision.wait:
            return self._place(run, decision)
        if demand.adapter and not any(demand.adapter in w.adapters for w in decodes.workers):
            # Until a worker loads it, its tenant's other requests go on.
            return Blocked.ITSELF
        avoided = (demand.failed | demand.busy | demand.ejected | demand.quarantined) - full
        if any(candidate.identity.instance_id in avoided for candidate in decision.candidates):
            return Blocked.ITSELF
        full_ones = any(
            candidate.filter_reason is FilterReason.BUSY for candidate in decision.candidates
        )
        return Blocked.BUSY if full_ones else Blocked.ABSENT

    def _now_demanded(self, run: AttemptRun, now: float) -> Demand:
        return replace(
            self._demand(run),
            failed=passed_over(self._failed, now),
            busy=passed_over(self._busy, now),
            ejected=self._fleet.prefills.ejected(now) | self._fleet.decodes.ejected(now),
            quarantined=self._services.quarantine.taken if run.suspect else frozenset(),
            not_giving=self._fleet.prefix_pauses.not_giving(now),
            not_collecting=self._fleet.prefix_pauses.not_collecting(now),
        )

    def at(self, move: Migration, tokens: int) -> Placement | None:
        """Returns the decode worker on which a sequence of this many tokens that migrates is to
        continue, which the caller releases, or None when the worker is gone."""
        return self._on(move.destination, tokens, RETURNS if move.returning else MOVES)

    def adopted(self, worker: WorkerIdentity, tokens: int) -> Placement | None:
        """Returns the decode worker that has a sequence of the request, which the caller releases,
        or None when the worker is gone."""
        place = self._on(worker, tokens, ADOPTS)
        if place is not None:
            self._on_placed()
        return place

    def _on(self, worker: WorkerIdentity, tokens: int, reason: str) -> Placement | None:
        decode = self._fleet.decodes.get(worker.instance_id)
        if decode is None:
            return None
        place = Placement(None, decode, Decision(None, worker, reason, ()))
        place.hold(1, tokens)
        return place

    def blame_prefill(self, worker: Worker[PrefillClient], error: BatonError) -> None:
        worker.failure(error)
        if not self._is_busy(worker.identity, error):
            self._pass_over(self._failed, worker.identity, math.inf)

    def blame_decode(
        self, worker: Worker[DecodeSession], error: BatonError, *, moved: bool
    ) -> None:
        """moved: the worker was to take over a sequence, which no turn had placed there."""
        worker.failure(error)
        if not self._is_busy(worker.identity, error, placed=not moved):
            self._pass_over(self._failed, worker.identity, RETRY_S * 2**self._decode_failures)
            self._decode_failures = min(self._decode_failures + 1, MAX_DOUBLINGS)

    def _is_busy(self, worker: WorkerIdentity, error: BatonError, *, placed: bool = True) -> bool:
        if error.reason is not Reason.OVERLOADED:
            return False
        if placed:
            self._services.dispatcher.refused()
        self._pass_over(self._busy, worker, max(BUSY_S, error.retry_after_s or 0.0))
        return True

    def _pass_over(self, until: dict[str, float], worker: WorkerIdentity, seconds: float) -> None:
        until[worker.instance_id] = asyncio.get_running_loop().time() + seconds

    def _place(self, run: AttemptRun, decision: Decision) -> Placement:
        prefill, decode = decision.prefill, decision.decode
        place = Placement(
            prefill=self._fleet.prefills.get(prefill.instance_id) if prefill else None,
            decode=self._fleet.decodes.get(decode.instance_id) if decode else None,
            decision=decision,
            quarantine=self._services.quarantine if run.suspect else None,
        )
        place.apart.callback(self._fleet.changed.set)
        return place
