"""Finds workers for the attempts of one request, and waits while there are none.

Requests wait here, in the router, not in workers' queues. Knows what went wrong for this request on
which worker, and for how long that worker is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.errors import BatonError, Overloaded, Reason, Unavailable
from baton.core.journey import AttemptRun, Leg
from baton.core.model import WorkerIdentity
from baton.core.routing import Decision, Demand, Fate, decide
from baton.router.decode_session import DecodeSession
from baton.router.fleet import Fleet
from baton.router.prefill_client import PrefillClient
from baton.router.worker_link import Worker

BUSY_S = 0.1
"""A worker that refused as overloaded is passed over for this long, or for as long as it says."""

FAILED_PREFILL_S = 30.0
"""Long: there is always decode to prefill instead."""

FAILED_DECODE_S = 0.25
"""Short, doubled each time: it may be the only one."""

LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Place:
    """Live workers for an attempt, and why these."""

    prefill: Worker[PrefillClient] | None
    decode: Worker[DecodeSession] | None
    decision: Decision

    @property
    def legs(self) -> frozenset[Leg]:
        legs = {Leg.PREFILL: self.prefill, Leg.DECODE: self.decode}
        return frozenset(leg for leg, worker in legs.items() if worker is not None)


class Placement:
    """The placements of one request. demand: of an attempt, without what this object knows."""

    def __init__(
        self,
        fleet: Fleet,
        demand: Callable[[AttemptRun, frozenset[str], frozenset[str]], Demand],
        *,
        local_prefill_tokens: int,
        wait_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._demand = demand
        self._local_prefill_tokens = local_prefill_tokens
        self._wait_timeout_s = wait_timeout_s
        self._failed: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._decode_failures = 0

    async def find(self, run: AttemptRun) -> Place | None:
        """Workers for the attempt, or None when it was over before there were any.

        Raises Unavailable or Overloaded when there were none for wait_timeout_s.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._wait_timeout_s
        while not run.over:
            now = loop.time()
            decision = decide(
                self._demand(run, _current(self._failed, now), _current(self._busy, now)),
                self._fleet.prefills.snapshots(),
                self._fleet.decodes.snapshots(),
                local_prefill_tokens=self._local_prefill_tokens,
            )
            self._fleet.misfits.note(decision)
            if not decision.wait:
                return self._place(decision)
            if now >= give_up:
                raise _nowhere(decision)
            ends = [*self._failed.values(), *self._busy.values(), give_up, now + LOOK_AGAIN_S]
            await self._fleet.changed.wait(max(0.001, min(ends) - now))
        return None

    def at(self, collector: WorkerIdentity) -> Place | None:
        """The decode worker that a sequence moves to, or None when it is gone."""
        decode = self._fleet.decodes.get(collector.incarnation)
        if decode is None:
            return None
        decision = Decision(None, collector, "its KV moves here from another decode worker", ())
        return Place(None, decode, decision)

    def blame_prefill(self, worker: WorkerIdentity, error: BatonError) -> None:
        if not self._is_busy(worker, error):
            self._pass_over(self._failed, worker, FAILED_PREFILL_S)

    def blame_decode(self, worker: WorkerIdentity, error: BatonError) -> None:
        if not self._is_busy(worker, error):
            self._pass_over(self._failed, worker, FAILED_DECODE_S * 2**self._decode_failures)
            self._decode_failures = min(self._decode_failures + 1, 4)

    def _is_busy(self, worker: WorkerIdentity, error: BatonError) -> bool:
        if error.reason is not Reason.OVERLOADED:
            return False
        self._pass_over(self._busy, worker, max(BUSY_S, error.retry_after_s or 0.0))
        return True

    def _pass_over(self, until: dict[str, float], worker: WorkerIdentity, seconds: float) -> None:
        until[worker.incarnation] = asyncio.get_running_loop().time() + seconds

    def _place(self, decision: Decision) -> Place:
        prefill, decode = decision.prefill, decision.decode
        return Place(
            prefill=self._fleet.prefills.get(prefill.incarnation) if prefill else None,
            decode=self._fleet.decodes.get(decode.incarnation) if decode else None,
            decision=decision,
        )


def _current(until: dict[str, float], now: float) -> frozenset[str]:
    """The workers still passed over; forgets the others."""
    for incarnation in [i for i, end in until.items() if end <= now]:
        del until[incarnation]
    return frozenset(until)


def _nowhere(decision: Decision) -> BatonError:
    if any(candidate.fate is Fate.BUSY for candidate in decision.candidates):
        return Overloaded("All workers are busy.", retry_after_s=1.0)
    return Unavailable("No worker is ready for this model.", retry_after_s=1.0)
