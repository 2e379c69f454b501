"""What of a tenant's limits is this router's, when several routers serve it.

A router's share of a limit is an equal part of it, and whatever the others leave unused: a tenant
whose one connection sticks to one router gets all of its quota there, and one that asks at every
router gets no more than its quota in total. Two greedy routers meet at equal parts: each has at
least that, and sees the other use the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.core.routing.load import TenantUse

SMOOTH_S = 5.0
"""Rates of use are averaged over about so long."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one tenant uses through other routers: rates, and what it holds now."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    requests: int = 0
    tokens: int = 0


NO_USE = Use()


def share(total: float, replicas: int, others: float) -> float:
    """This router's part of a limit that the others use so much of."""
    return max(total / replicas, total - others)


@dataclass(slots=True)
class _Rate:
    """How fast a counter grows, exponentially averaged."""

    counted: int
    at: float
    per_s: float = 0.0

    def see(self, counted: int, now: float) -> None:
        passed = now - self.at
        if passed <= 0:
            return
        # A worker that has forgotten a tenant meanwhile counts from 0 again.
        grown = counted - self.counted if counted >= self.counted else counted
        weight = 1 - math.exp(-passed / SMOOTH_S)
        self.per_s += (grown / passed - self.per_s) * weight
        self.counted, self.at = counted, now


@dataclass(slots=True)
class _Seen:
    requests: _Rate
    tokens: _Rate
    held: TenantUse


class OthersUse:
    """Follows what workers report of other routers' requests. Workers are named by instance id."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._sums: dict[str, Use] = {}

    def see(self, reports: Mapping[str, Iterable[TenantUse]], now: float) -> None:
        """The newest report of every worker that there is; the others are forgotten."""
        for gone in self._seen.keys() - reports.keys():
            del self._seen[gone]
        for worker, uses in reports.items():
            known = self._seen.setdefault(worker, {})
            named = {use.tenant: use for use in uses}
            for gone in known.keys() - named.keys():
                del known[gone]
            for tenant, use in named.items():
                if tenant not in known:
                    # How long its counts took to grow is not known: they are where it begins.
                    known[tenant] = _Seen(_Rate(use.requests, now), _Rate(use.tokens, now), use)
                seen = known[tenant]
                seen.requests.see(use.requests, now)
                seen.tokens.see(use.tokens, now)
                seen.held = use
        self._sums = {}

    def of(self, tenant: str) -> Use:
        """All workers together."""
        if tenant not in self._sums:
            found = [known[tenant] for known in self._seen.values() if tenant in known]
            self._sums[tenant] = Use(
                requests_per_s=sum(seen.requests.per_s for seen in found),
                tokens_per_s=sum(seen.tokens.per_s for seen in found),
                requests=sum(seen.held.held_requests for seen in found),
                tokens=sum(seen.held.held_tokens for seen in found),
            )
        return self._sums[tenant]
