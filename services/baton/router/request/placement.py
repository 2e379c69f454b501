"""Finds workers for the attempts of one request, at the dispatcher where they wait for their turn.

Knows what went wrong for this request on which worker, and for how long that worker is passed over
by it; what goes wrong for all is the breakers' business.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from baton.core.admission.fair_queue import Entry
from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, Reason, Unavailable
from baton.core.request.attempt_states import Phase
from baton.core.request.model import WorkerIdentity
from baton.core.request.request_state import AttemptRun
from baton.core.routing.quarantine import Quarantine
from baton.core.routing.routing import Decision, Demand, FilterReason, RoutingPolicy, decide
from baton.router.request.dispatcher import (
    LOOK_AGAIN_S,
    Blocked,
    Claim,
    Dispatcher,
    PendingAttempt,
    WorkerClass,
)
from baton.router.workers.decode_session import DecodeSession
from baton.router.workers.fleet import Fleet
from baton.router.workers.prefill_client import PrefillClient
from baton.router.workers.worker import Placed, Worker

BUSY_S = 0.1
"""A worker that refused as overloaded is passed over for this long, or for as long as it says."""

RETRY_S = 0.25
"""Pause before a request is run again on a decode worker that lost it, which may be the only one;
doubled each time. A prefill worker that lost it is not asked again: decode can prefill instead."""

MAX_DOUBLINGS = 4


MAX_DECISIONS = 8
"""Of one request that can be looked at afterwards."""


@dataclass(slots=True)
class Placement:
    """Live workers for an attempt, and why these. claim: what is taken of them until the first
    token. Whoever has it releases it.
    """

    prefill: Worker[PrefillClient] | None
    decode: Worker[DecodeSession] | None
    decision: Decision
    claim: Claim | None = None
    held: ExitStack = field(default_factory=ExitStack)
    quarantine: Quarantine | None = None
    """Of a suspect."""
    apart: ExitStack = field(default_factory=ExitStack)
    """Keeps other suspects off these workers, until this one is cleared."""
    computing: Placed | None = None

    @property
    def instance_ids(self) -> frozenset[str]:
        return frozenset(
            worker.identity.instance_id for worker in (self.prefill, self.decode) if worker
        )

    @property
    def phases(self) -> frozenset[Phase]:
        phases = {Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}
        return frozenset(phase for phase, worker in phases.items() if worker is not None)

    def hold(self, sequences: int, tokens: int) -> None:
        """The attempt counts as placed on its workers, until `release`; its uncached tokens where
        they are computed, until `prefilled`. tokens: of its input."""
        uncached = self.decision.uncached_tokens
        if self.prefill is not None:
            self.computing = self.prefill.place(sequences, uncached, tokens)
            self.held.enter_context(self.computing)
        if self.decode is not None:
            here = self.decode.place(sequences, 0 if self.prefill else uncached, tokens)
            self.held.enter_context(here)
            self.computing = self.computing or here
        if self.quarantine is not None:
            # Not later: the next one may be placed before this attempt knows of its place.
            self.apart.enter_context(self.quarantine.entered(self.instance_ids))

    def prefilled(self) -> None:
        """The input is computed, or will not be there."""
        if self.computing is None:
            return
        if self.prefill is not None:
            self.computing.release()
        else:
            self.computing.computed()

    def answered(self, queue_s: float = 0.0, compute_s: float = 0.0) -> None:
        """See `Claim`."""
        if self.claim is not None:
            self.claim.answered(queue_s, compute_s)

    def release(self) -> None:
        self.held.close()
        self.apart.close()
        if self.claim is not None:
            self.claim.release()


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """How a request stands in the queue. cost: what it is expected to come to, in tokens. since:
    when it arrived, deadline: when it must have ended; readings of the loop's clock. on_placed:
    called whenever an attempt of it got workers.
    """

    tenant: Tenant
    priority: int
    cost: int
    since: float
    deadline: float
    on_placed: Callable[[], None]


class Placer:
    """The placements of one request. demand: of an attempt, without what this object knows."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        standing: QueueEntry,
        quarantine: Quarantine,
        demand: Callable[[AttemptRun], Demand],
        *,
        policy: RoutingPolicy,
        wait_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._standing = standing
        self._quarantine = quarantine
        self._demand = demand
        self._policy = policy
        self._wait_timeout_s = wait_timeout_s
        self._failed: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._decode_failures = 0
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        """The newest ones, oldest first: why the request ran where it did."""

    async def find(self, run: AttemptRun) -> Placement | None:
        """Workers for the attempt, which the caller releases, or None when it was over before.

        Raises Refusal when there will be none in time, Unavailable or Overloaded when there were
        none for wait_timeout_s.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._wait_timeout_s
        while not run.over:
            found = await self._dispatcher.wait(self._entry(run, give_up))
            if not isinstance(found, Blocked):
                if found is not None:
                    self._standing.on_placed()
                return found
            now = loop.time()
            if now >= give_up:
                raise Unavailable("No worker is ready for this model.", retry_after_s=1.0)
            # Breakers and quarantine say nothing of when they end.
            ends = [*self._failed.values(), *self._busy.values(), give_up, now + LOOK_AGAIN_S]
            await self._fleet.changed.wait(max(0.001, min(ends) - now))
        return None

    def _entry(self, run: AttemptRun, give_up: float) -> Entry[PendingAttempt]:
        """Only a request's first attempt waits its turn; later ones have had it."""
        loop, standing = asyncio.get_running_loop(), self._standing
        demand = self._demand(run)
        resumed = run.attempt.attempt > 0
        again = demand.input_tokens if run.attempt.position else 0
        pending_attempt = PendingAttempt(
            find=lambda full: self._find(run, full),
            over=lambda: run.over,
            kind=WorkerClass(
                demand.model, demand.needs_decode, demand.input_tokens <= self._policy.short
            ),
            input_tokens=demand.input_tokens,
            choices=demand.choices,
            give_up=give_up,
            future=loop.create_future(),
        )
        return Entry(
            pending_attempt,
            standing.tenant.name,
            standing.tenant.weight,
            standing.priority,
            again if resumed else standing.cost,
            arrived=standing.since,
            deadline=standing.deadline,
            resumed=resumed,
        )

    def _find(self, run: AttemptRun, full: frozenset[str]) -> Placement | Blocked:
        now = asyncio.get_running_loop().time()
        demand = self._now_demanded(run, now)
        decision = decide(
            replace(demand, busy=demand.busy | full),
            self._fleet.prefills.view(demand.prefix_hashes),
            self._fleet.decodes.view(demand.prefix_hashes),
            self._policy,
            now,
        )
        self._fleet.incompatible_pairs.note(decision)
        if not decision.wait:
            self.decisions.append(decision)
            return self._place(run, decision)
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
            failed=_current(self._failed, now),
            busy=_current(self._busy, now),
            ejected=self._fleet.prefills.ejected(now) | self._fleet.decodes.ejected(now),
            quarantined=self._quarantine.taken if run.suspect else frozenset(),
        )

    def at(self, receiver: WorkerIdentity, tokens: int) -> Placement | None:
        """The decode worker that a sequence of so many tokens moves to, which the caller releases,
        or None when it is gone."""
        decode = self._fleet.decodes.get(receiver.instance_id)
        if decode is None:
            return None
        decision = Decision(None, receiver, "its KV moves here from another decode worker", ())
        place = Placement(None, decode, decision)
        place.hold(1, tokens)
        return place

    def blame_prefill(self, worker: Worker[PrefillClient], error: BatonError) -> None:
        worker.blamed(error)
        if not self._is_busy(worker.identity, error):
            self._pass_over(self._failed, worker.identity, math.inf)

    def blame_decode(self, worker: Worker[DecodeSession], error: BatonError) -> None:
        worker.blamed(error)
        if not self._is_busy(worker.identity, error):
            self._pass_over(self._failed, worker.identity, RETRY_S * 2**self._decode_failures)
            self._decode_failures = min(self._decode_failures + 1, MAX_DOUBLINGS)

    def _is_busy(self, worker: WorkerIdentity, error: BatonError) -> bool:
        if error.reason is not Reason.OVERLOADED:
            return False
        self._dispatcher.refused()
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
            quarantine=self._quarantine if run.suspect else None,
        )
        place.apart.callback(self._fleet.changed.set)
        return place


def _current(until: dict[str, float], now: float) -> frozenset[str]:
    """The workers still passed over; forgets the others."""
    for instance_id in [i for i, end in until.items() if end <= now]:
        del until[instance_id]
    return frozenset(until)
