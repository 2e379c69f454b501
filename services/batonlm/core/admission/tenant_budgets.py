"""What each tenant may still use through this router, given its use through others.

Rates are token buckets that hold ten seconds' worth of this router's equal part of the rate and
start full. The refill rate can borrow what other routers leave unused; the capacity cannot, because
each of them holds a part of its own. Tokens are charged up front, prompt and longest output, and
the unused rest is refunded at the end. A limit of None is no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Overloaded
from batonlm.core.request.attempt import Attempt
from batonlm.core.routing.load import TenantUse


class Limit(Enum):
    """The limit that was reached. The values are labels of `baton_refusals_total`."""

    REQUEST_RATE = "requests_per_minute"
    TOKEN_RATE = "tokens_per_minute"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    REQUESTS = "requests"
    TOKENS = "tokens"
    INPUT = "input"
    QUEUE = "queue"
    WAIT = "wait"
    KV = "kv"
    DEADLINE = "deadline"


class Refusal(Overloaded):
    """Why a request is refused: an `Overloaded` with the limit that was reached, for the metrics.
    retry_after_s is set."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        limit: Limit = Limit.REQUESTS,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.limit = limit


SMOOTH_S = 5.0
"""Rates of use are averaged over about this many seconds."""


@dataclass(frozen=True, slots=True)
class OthersUsage:
    """What one tenant uses through other routers: rates, and what it holds now."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    requests: int = 0
    tokens: int = 0


NO_USE = OthersUsage()
EQUAL_PARTS = OthersUsage(requests_per_s=math.inf, tokens_per_s=math.inf)
"""Of what nobody reports: others may use all of their parts of the rates."""


def share(total: float, replicas: int, others: float) -> float:
    """Returns this router's part of a limit of which the others use this much.

    It is an equal part plus what the others leave unused. A tenant whose one connection sticks to
    one router gets its full quota there, and one that calls every router gets no more than its
    quota in total. Two greedy routers converge to equal parts: each has at least that, and the
    other's use takes the rest.
    """
    return max(total / replicas, total - others)


@dataclass(slots=True)
class _Rate:
    """The growth rate of a counter, exponentially averaged."""

    counted: int
    at: float
    per_s: float = 0.0

    def see(self, counted: int, now: float) -> None:
        passed = now - self.at
        if passed <= 0:
            return
        # A worker that has dropped the tenant meanwhile counts from 0 again.
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
    """Tracks what workers report about other routers' requests. Workers are identified by instance
    id."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._sums: dict[str, OthersUsage] = {}

    def see(self, reports: Mapping[str, Iterable[TenantUse]], now: float) -> None:
        """Takes the newest report of every live worker; other workers are dropped."""
        for gone in self._seen.keys() - reports.keys():
            del self._seen[gone]
        for worker, uses in reports.items():
            known = self._seen.setdefault(worker, {})
            named = {use.tenant: use for use in uses}
            for gone in known.keys() - named.keys():
                del known[gone]
            for tenant, use in named.items():
                if tenant not in known:
                    # The time over which the counts grew is unknown, so they are only a starting
                    # point.
                    known[tenant] = _Seen(_Rate(use.requests, now), _Rate(use.tokens, now), use)
                seen = known[tenant]
                seen.requests.see(use.requests, now)
                seen.tokens.see(use.tokens, now)
                seen.held = use
        self._sums = {}

    def of(self, tenant: str) -> OthersUsage:
        """Returns the sum over all workers."""
        if tenant not in self._sums:
            found = [known[tenant] for known in self._seen.values() if tenant in known]
            self._sums[tenant] = OthersUsage(
                requests_per_s=sum(seen.requests.per_s for seen in found),
                tokens_per_s=sum(seen.tokens.per_s for seen in found),
                requests=sum(seen.held.held_requests for seen in found),
                tokens=sum(seen.held.held_tokens for seen in found),
            )
        return self._sums[tenant]


MAX_KNOWN = 4096
MAX_TOLD = 64


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    tokens: int = 0


class UseMeter:
    """Counts what tenants use of one worker, by router, so that routers learn about use elsewhere.

    It keeps a bounded number of tenants, the most recently active ones. Tenants of routers that are
    gone are dropped.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Counts] = {}
        """By router and tenant, least recently active first."""

    def began(self, router: str, attempt: Attempt) -> None:
        """An attempt started. Only the first attempt of a request counts as a request and its
        prompt, because later ones continue what was charged."""
        first = attempt.attempt == 0
        self._add(router, attempt.tenant, int(first), attempt.num_prompt_tokens if first else 0)

    def made(self, router: str, attempt: Attempt, tokens: int) -> None:
        """Counts sampled output tokens."""
        self._add(router, attempt.tenant, 0, tokens)

    def others(self, router: str, here: Iterable[tuple[str, Attempt]]) -> tuple[TenantUse, ...]:
        """Returns the use through all other routers. here: all running attempts, with their
        routers."""
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


class TokenBucket:
    """A token bucket, which starts full.

    The token bucket of RFC 2215 (section 2.3), with two additions: unused tokens can be returned,
    and an amount larger than the whole bucket passes when the bucket is full and leaves a debt, so
    that no amount is refused for ever. `now` is a reading of one clock, in seconds.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """rate: units per second. burst: the capacity in units."""
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def resize(self, rate: float, burst: float, now: float) -> None:
        """Changes rate and burst. The level stays, up to the new burst."""
        self._fill(now)
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def level(self, now: float) -> float:
        """Returns the available amount; a negative number is a debt."""
        self._fill(now)
        return self._level

    def is_full(self, now: float) -> bool:
        return self.level(now) >= self._burst

    def wait_s(self, amount: float, now: float) -> float:
        """Returns the seconds until the amount is available if nothing else is taken; 0.0: now."""
        missing = min(amount, self._burst) - self.level(now)
        return max(0.0, missing / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Takes an amount. The caller checks `wait_s` first."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Returns what was taken and not used; negative: takes what was used in addition."""
        self._fill(now)
        self._level = min(self._burst, self._level + amount)

    def _fill(self, now: float) -> None:
        # An earlier clock reading from another caller must not lower the level.
        passed = max(0.0, now - self._at)
        self._level = min(self._burst, self._level + passed * self._rate)
        self._at = max(self._at, now)


BURST_S = 10.0
"""The capacity of a bucket, in seconds of its rate."""

MAX_IDLE = 4096
"""Most tenants that are kept while they have no requests."""

HELD_RETRY_S = 1.0
"""The retry delay, in seconds, for limits that are freed when requests end."""


@dataclass(slots=True)
class Account:
    """The use of one tenant through this router."""

    requests: int = 0
    """Held now."""
    tokens: int = 0
    """Held now."""
    buckets: dict[Limit, TokenBucket] = field(default_factory=dict)


class TenantBudgets:
    """The budgets of all tenants. `now` is a reading of one clock, in seconds."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def held(self, tenant: str) -> tuple[int, int]:
        """Returns the requests and the tokens that a tenant holds."""
        account = self._accounts.get(tenant)
        return (0, 0) if account is None else (account.requests, account.tokens)

    def check(
        self,
        tenant: Tenant,
        requests: int,
        tokens: int,
        others: OthersUsage,
        replicas: int,
        now: float,
    ) -> None:
        """Raises Refusal when the tenant may not use this much more now."""
        account = self._account(tenant.name, now)
        self._shape(account, tenant, others, replicas, now)
        for limit, amount in ((Limit.REQUEST_RATE, requests), (Limit.TOKEN_RATE, tokens)):
            bucket = account.buckets.get(limit)
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s > 0:
                rate = getattr(tenant, limit.value)
                what = limit.value.replace("_", " ")
                text = f"More than {rate} {what} were asked for."
                raise Refusal(text, retry_after_s=wait_s, limit=limit)
        held = (
            (Limit.TENANT_REQUESTS, tenant.max_requests, account.requests, requests,
             others.requests, "requests"),
            (Limit.TENANT_TOKENS, tenant.max_tokens, account.tokens, tokens,
             others.tokens, "tokens"),
        )  # fmt: skip
        for limit, most, here, more, elsewhere, what in held:
            # A single request is admitted whatever its size; otherwise it could never run.
            if most is None or not more or not (here or elsewhere):
                continue
            if here + more > share(most, replicas, elsewhere):
                text = f"There may be {most} {what} at a time."
                raise Refusal(text, retry_after_s=HELD_RETRY_S, limit=limit)

    def take(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        """Charges what `check` has admitted; negative amounts refund it."""
        account = self._account(tenant, now)
        account.requests += requests
        account.tokens += tokens
        for limit, amount in ((Limit.REQUEST_RATE, requests), (Limit.TOKEN_RATE, tokens)):
            if limit in account.buckets:
                account.buckets[limit].take(amount, now)

    def release(self, tenant: str, requests: int, tokens: int, unused: int, now: float) -> None:
        """Releases what a tenant holds. unused: tokens to refund; negative: additional tokens to
        charge."""
        account = self._accounts[tenant]
        account.requests -= requests
        account.tokens -= tokens
        if Limit.TOKEN_RATE in account.buckets:
            account.buckets[Limit.TOKEN_RATE].give_back(unused, now)

    def count_request(self, tenant: Tenant, others: OthersUsage, replicas: int, now: float) -> None:
        """Counts a request that was never admitted against the rate."""
        account = self._account(tenant.name, now)
        self._shape(account, tenant, others, replicas, now)
        bucket = account.buckets.get(Limit.REQUEST_RATE)
        if bucket is not None:
            bucket.take(1, now)

    def refund_request(self, tenant: str, now: float) -> None:
        """Refunds a request that was charged and then refused."""
        bucket = self._accounts[tenant].buckets.get(Limit.REQUEST_RATE)
        if bucket is not None:
            bucket.give_back(1, now)

    def _account(self, tenant: str, now: float) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_IDLE:
                self._forget(now)
            account = self._accounts[tenant] = Account()
        return account

    def _forget(self, now: float) -> None:
        """Drops tenants that hold nothing and whose buckets are full."""
        for name, account in list(self._accounts.items()):
            full = all(bucket.is_full(now) for bucket in account.buckets.values())
            if full and not account.requests and not account.tokens:
                del self._accounts[name]

    def _shape(
        self, account: Account, tenant: Tenant, others: OthersUsage, replicas: int, now: float
    ) -> None:
        """Sizes the buckets by the tenant's current limits, which can be reloaded."""
        rates = (
            (Limit.REQUEST_RATE, tenant.requests_per_minute, others.requests_per_s),
            (Limit.TOKEN_RATE, tenant.tokens_per_minute, others.tokens_per_s),
        )
        for limit, per_minute, elsewhere in rates:
            if per_minute is None:
                account.buckets.pop(limit, None)
                continue
            rate = share(per_minute / 60, replicas, elsewhere)
            burst = max(1.0, per_minute / 60 / replicas * BURST_S)
            bucket = account.buckets.get(limit)
            if bucket is None:
                account.buckets[limit] = bucket = TokenBucket(rate, burst, now)
            bucket.resize(rate, burst, now)
