"""UseMeter, what tenants use of one worker, by the router that asks for it.

Routers learn from it what a tenant uses elsewhere. It remembers a bounded number of tenants, those
that were active last; routers that are gone are forgotten with theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.request.attempt import Attempt
from baton.core.routing.load import TenantUse

MAX_KNOWN = 4096
MAX_TOLD = 64


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    tokens: int = 0


class UseMeter:
    """One per worker."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Counts] = {}
        """By router and tenant; the one that was active last is last."""

    def began(self, router: str, attempt: Attempt) -> None:
        """An attempt was taken on. Only a request's first one counts as a request and its prompt:
        the others go on with what it was charged for."""
        first = attempt.attempt == 0
        self._add(router, attempt.tenant, int(first), attempt.num_prompt_tokens if first else 0)

    def made(self, router: str, attempt: Attempt, tokens: int) -> None:
        """So many output tokens were sampled."""
        self._add(router, attempt.tenant, 0, tokens)

    def others(self, router: str, here: Iterable[tuple[str, Attempt]]) -> tuple[TenantUse, ...]:
        """The use through all other routers. here: all attempts that run, with their routers."""
        counts: dict[str, _Counts] = {}
        held: dict[str, _Counts] = {}
        for (of, tenant), counted in reversed(self._counts.items()):
            if of != router and (tenant in counts or len(counts) < MAX_TOLD):
                _sum(counts, tenant, counted.requests, counted.tokens)
        for of, attempt in here:
            if of != router and attempt.tenant in counts:
                tokens = len(attempt.token_ids) + attempt.longest_output
                _sum(held, attempt.tenant, 1, tokens)
        none = _Counts()
        return tuple(
            TenantUse(
                tenant,
                counted.requests,
                counted.tokens,
                held.get(tenant, none).requests,
                held.get(tenant, none).tokens,
            )
            for tenant, counted in counts.items()
        )

    def _add(self, router: str, tenant: str, requests: int, tokens: int) -> None:
        if not tenant:
            return
        counted = self._counts.pop((router, tenant), None) or _Counts()
        counted.requests += requests
        counted.tokens += tokens
        self._counts[router, tenant] = counted
        if len(self._counts) > MAX_KNOWN:
            del self._counts[next(iter(self._counts))]


def _sum(into: dict[str, _Counts], tenant: str, requests: int, tokens: int) -> None:
    total = into.setdefault(tenant, _Counts())
    total.requests += requests
    total.tokens += tokens
