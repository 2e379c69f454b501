"""What each tenant may still use here, and what is used of it elsewhere.

Rates are token buckets that hold ten seconds' worth of this router's equal part of the rate, and
are full at first: what they fill with may be lent by the other routers, what they hold may not,
for each of them holds its own part. Tokens are charged up front, prompt and longest output; what
was not used is given back at the end. A limit of None is no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from baton.core.admission.tenants import Tenant
from baton.core.errors import Overloaded
from baton.core.request.attempt import Attempt
from baton.core.routing.load import TenantUse


class Limit(Enum):
    """What was reached. The values are labels of `baton_refusals_total`."""

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
    """Why a request is not let in: an `Overloaded` with the limit that was reached, for the
    metrics. retry_after_s is set."""

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
"""Rates of use are averaged over about so long."""


@dataclass(frozen=True, slots=True)
class OthersUsage:
    """What one tenant uses through other routers: rates, and what it holds now."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    requests: int = 0
    tokens: int = 0


NO_USE = OthersUsage()


def share(total: float, replicas: int, others: float) -> float:
    """This router's part of a limit of which the others use so much.

    It is an equal part, and whatever the others leave unused: a tenant whose one connection sticks
    to one router gets all of its quota there, and one that calls every router gets no more than its
    quota in total. Two greedy routers meet at equal parts: each has at least that, and the other's
    use takes the rest.
    """
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
        self._sums: dict[str, OthersUsage] = {}

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

    def of(self, tenant: str) -> OthersUsage:
        """All workers together."""
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
    """What tenants use of one worker, by router: routers learn from it of use elsewhere.

    It remembers a bounded number of tenants, those that were active last; routers that are gone are
    forgotten with theirs.
    """

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


class TokenBucket:
    """What may be used per second and saved up to a burst. It starts full.

    The token bucket of RFC 2215 (section 2.3), with two additions: what was taken and not used can
    be given back, and an amount larger than the whole bucket passes when the bucket is full and
    leaves a debt, so that nothing is refused for ever. rate: units a second. burst: units it holds
    at most. now: readings of one clock, in seconds.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def resize(self, rate: float, burst: float, now: float) -> None:
        """From now on another rate and burst. What is in it stays, as far as it fits."""
        self._fill(now)
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def level(self, now: float) -> float:
        """What could be taken now; negative: a debt."""
        self._fill(now)
        return self._level

    def is_full(self, now: float) -> bool:
        return self.level(now) >= self._burst

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until an amount could be taken, if nobody else took any; 0.0: now."""
        missing = min(amount, self._burst) - self.level(now)
        return max(0.0, missing / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Whether there is enough is the caller's to ask, with `wait_s`."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used; negative: what was used and not taken."""
        self._fill(now)
        self._level = min(self._burst, self._level + amount)

    def _fill(self, now: float) -> None:
        # A clock that was read a little earlier by somebody else takes nothing away.
        passed = max(0.0, now - self._at)
        self._level = min(self._burst, self._level + passed * self._rate)
        self._at = max(self._at, now)


BURST_S = 10.0
"""What a bucket holds, in seconds of its rate."""

MAX_IDLE = 4096
"""Tenants that are remembered though nothing of theirs is here."""

HELD_RETRY_S = 1.0
"""When to ask again for what comes free as requests end."""


@dataclass(slots=True)
class Account:
    """One tenant's use of this router. requests, tokens: held now."""

    requests: int = 0
    tokens: int = 0
    buckets: dict[Limit, TokenBucket] = field(default_factory=dict)


class TenantBudgets:
    """All calls name the time, as a reading of one clock, in seconds."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def held(self, tenant: str) -> tuple[int, int]:
        """Requests and tokens."""
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
        """Raises Refusal when the tenant may not have so many more now."""
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
            # One alone is let in whatever its size, or it could never be.
            if most is None or not more or not (here or elsewhere):
                continue
            if here + more > share(most, replicas, elsewhere):
                text = f"There may be {most} {what} at a time."
                raise Refusal(text, retry_after_s=HELD_RETRY_S, limit=limit)

    def take(self, tenant: str, requests: int, tokens: int, now: float) -> None:
        """Charges what `check` has let pass; less than nothing: takes it back."""
        account = self._account(tenant, now)
        account.requests += requests
        account.tokens += tokens
        for limit, amount in ((Limit.REQUEST_RATE, requests), (Limit.TOKEN_RATE, tokens)):
            if limit in account.buckets:
                account.buckets[limit].take(amount, now)

    def release(self, tenant: str, requests: int, tokens: int, unused: int, now: float) -> None:
        """They are held no more; of the tokens, so many were not used. Negative: so many more were
        used."""
        account = self._accounts[tenant]
        account.requests -= requests
        account.tokens -= tokens
        if Limit.TOKEN_RATE in account.buckets:
            account.buckets[Limit.TOKEN_RATE].give_back(unused, now)

    def count_request(self, tenant: Tenant, others: OthersUsage, replicas: int, now: float) -> None:
        """A request that was never let in counts against the rate all the same."""
        account = self._account(tenant.name, now)
        self._shape(account, tenant, others, replicas, now)
        bucket = account.buckets.get(Limit.REQUEST_RATE)
        if bucket is not None:
            bucket.take(1, now)

    def refund_request(self, tenant: str, now: float) -> None:
        """A request that was charged and then refused does not count against the rate."""
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
        """Whoever holds nothing and has saved up all there is to save."""
        for name, account in list(self._accounts.items()):
            full = all(bucket.is_full(now) for bucket in account.buckets.values())
            if full and not account.requests and not account.tokens:
                del self._accounts[name]

    def _shape(
        self, account: Account, tenant: Tenant, others: OthersUsage, replicas: int, now: float
    ) -> None:
        """Buckets of the sizes that the tenant's limits have now; limits are reloaded."""
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
