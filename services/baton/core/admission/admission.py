"""Admission, whether a request is let in: budgets, queue, KV room and time.

First room for its bytes, before they are read: a Holding, which lasts until its prompt is encoded.
Then, while nothing but its tenant is known, whether any request could be let in at all: what is
refused anyway must cost next to nothing. Then a request is asked about twice. Before its prompt is
encoded only what is certain counts against it: one request, its longest output, and the least
tokens that the prompt can have. After that its numbers are exact. Either way it gets a Grant,
which somebody must release.

What all tenants have together, bytes of input, requests, tokens and room for prompts in KV memory,
is shared by `FairBound`: nobody is refused because of what another tenant holds, as long as it
holds little itself (see there). What a request's own fault has cost is paid for, in requests and
in tokens; what Baton refuses or fails to do is not.

Whoever could only wait in vain is refused at once: the queue's drain is measured, so the wait of a
new entry can be foretold, behind all that is let in already. When its prompt is encoded it is
refused only if the wait has become too long for certain: a refusal should come at once or not at
all. A refusal says when to come back: later the longer the queue is, and for
each one at another time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.admission.fair_queue import DrainRate, FairQueue
from baton.core.admission.tenant_budgets import NO_USE, Limit, OthersUsage, Refusal, TenantBudgets
from baton.core.admission.tenants import Tenant
from baton.core.errors import InvalidArgument


class FairBound:
    """A bound on what all callers hold together that no caller can exhaust.

    A caller may hold up to `factor` times what is then still free, by its weight (dynamic
    thresholds: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998). One caller alone gets factor / (1 + factor) of the bound; when several are
    greedy, each gets its weight's share as soon as what they held before has been given back; and
    some of it is always free. A caller that holds nothing is let in whenever its first amount is
    free.

    The invariant, for callers of equal weight whose amounts are at most M: whatever k others take
    and give back, in any order, F = most / (1 + factor)^k - M / factor of the bound stays free of
    them. So a caller that never holds more than factor / (1 + factor) x F is never kept out because
    of others.
    """

    def __init__(self, factor: float) -> None:
        self.total = 0
        """Held by all callers together."""
        self._factor = factor
        self._held: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        """Of those who hold something."""
        self._num_of_weight: Counter[float] = Counter()
        """How many of those there are of each weight."""

    def held(self, caller: str) -> int:
        return self._held.get(caller, 0)

    def has_room(self, caller: str, weight: float, amount: int, most: float) -> bool:
        """Whether a caller may hold so much more, while all may hold `most`. Larger amounts only
        have less room. A caller without a name has nobody to share with."""
        # One alone is let in whatever its size, or it could never be.
        if not self.total:
            return True
        left = most - self.total - amount
        held = self._held.get(caller, 0)
        if left < 0 or not (held and caller):
            return left >= 0
        heaviest = max(weight, *self._num_of_weight)
        return held + amount <= self._factor * weight / heaviest * left

    def take(self, caller: str, weight: float, amount: int) -> None:
        """Whether there is room is the caller's to ask, with `has_room`."""
        if not amount:
            return
        if caller not in self._held:
            self._held[caller] = 0
            self._weights[caller] = weight
            self._num_of_weight[weight] += 1
        self._held[caller] += amount
        self.total += amount

    def give_back(self, caller: str, amount: int) -> None:
        """As much as was taken, all in all."""
        if not amount:
            return
        self.total -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]
            weight = self._weights.pop(caller)
            self._num_of_weight[weight] -= 1
            if not self._num_of_weight[weight]:
                del self._num_of_weight[weight]


class PendingEncodes:
    """Prompts that are let in and not encoded yet: tokens as the queue counts them, by tenant and
    priority (smaller is more urgent).

    Without this count a short queue would let in far too many: a lot of requests come in the time
    that one prompt takes to be encoded, and would all see the same room.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, Counter[int]] = {}

    def add(self, tenant: str, priority: int, tokens: int) -> None:
        self._tokens.setdefault(tenant, Counter())[priority] += tokens

    def remove(self, tenant: str, priority: int, tokens: int) -> None:
        """As many as were added, together."""
        of_tenant = self._tokens[tenant]
        of_tenant[priority] -= tokens
        if not of_tenant[priority]:
            del of_tenant[priority]
        if not of_tenant:
            del self._tokens[tenant]

    def ahead(self, tenant: str, priority: int) -> int:
        """Of the same tenant, and at least as urgent. What others send comes in between by their
        shares alone, and is seen when it waits."""
        of_tenant = self._tokens.get(tenant)
        if of_tenant is None:
            return 0
        return sum(tokens for urgency, tokens in of_tenant.items() if urgency <= priority)

    def __len__(self) -> int:
        """Tenants with something on its way."""
        return len(self._tokens)


MAX_INPUT_BYTES = 32 << 20
"""Of all requests that are being received or wait to be encoded. In memory they take about three
times as much: as they came, as text, and as what a tokenizer is sent."""

INPUT_FACTOR = 1.0
"""Of the FairBound of bytes: one caller alone may hold half of them. As one request may be a
thirty-second part of the bound, the rest has to bear several callers of that kind."""

HELD_FACTOR = 3.0
"""Of the FairBounds of requests, tokens and KV: one tenant alone may hold three quarters."""

SHORTEST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0
TOKEN_BYTES = 4
"""Of a prompt, about: what one that is not encoded yet will come to."""

FIRST_GUESS = 256.0
"""Output tokens of a choice, before any was seen to end."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What all requests of a router may come to."""

    max_requests: int
    """At a time."""
    max_tokens: int
    """Of all of them, prompts and longest outputs; 0: no limit."""
    max_queue_s: float
    """The longest predicted wait that a request is let in for."""
    max_input_bytes: int = MAX_INPUT_BYTES


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet at one moment, as one tenant meets it."""

    kv_tokens: int | None = None
    """Positions that decode workers have free blocks for; None: not known."""
    first_token_s: float = 0.0
    """From a place to the first token, usually."""
    replicas: int = 1
    """Live routers, this one among them."""
    others: OthersUsage = NO_USE
    """What the tenant uses through the other routers."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known of a request before its prompt is encoded."""

    tenant: Tenant
    priority: int
    """Smaller is more urgent."""
    choices: int
    """0 for a request that only has a text encoded or decoded, and gets no worker."""
    least_tokens: int
    """Of its prompt, at least."""
    most_tokens: int
    """Of its prompt, at most."""
    longest_output: int
    """Tokens of all its choices that it requests at least."""

    @property
    def least_charge(self) -> int:
        return self.least_tokens + self.longest_output if self.choices else 0

    @property
    def likely_tokens(self) -> int:
        """Of the prompt."""
        return max(self.least_tokens, self.most_tokens // TOKEN_BYTES)


def check_priority(tenant: Tenant, priority: int) -> None:
    """Raises InvalidArgument when a tenant asks for more urgency than it may."""
    if tenant.most_urgent is not None and priority < tenant.most_urgent:
        raise InvalidArgument(
            f"priority must be at least {tenant.most_urgent} with this key (smaller is more "
            "urgent).",
            field="priority",
        )


class Admission:
    """jitter: a random number from 0 to 1, each time another one. All times are readings of one
    clock, in seconds.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        queue: FairQueue[Any],
        drain: DrainRate,
        jitter: Callable[[], float],
    ) -> None:
        self.budgets = TenantBudgets()
        self.input_bytes = FairBound(INPUT_FACTOR)
        self.requests = FairBound(HELD_FACTOR)
        self.tokens = FairBound(HELD_FACTOR)
        """Charged: prompts and longest outputs."""
        self.unplaced = FairBound(HELD_FACTOR)
        """Prompt tokens of those who are let in and have no place yet."""
        self.approach = PendingEncodes()
        self._limits = limits
        self._queue = queue
        self._drain = drain
        self._jitter = jitter
        self._output = FIRST_GUESS

    def receive(self, tenant: Tenant, size: int, outlook: FleetState, now: float) -> Holding:
        """Room for so many bytes of a request, before they are read. Raises Refusal, also when the
        tenant may make no request at all now."""
        self._check_requests(tenant)
        self._check_budgets(tenant, 1, 0, outlook, now)
        holding = Holding(self, tenant)
        holding.grow(size)
        return holding

    def precheck(self, tenant: Tenant, priority: int, outlook: FleetState, now: float) -> None:
        """Raises Refusal when not even the least request of a tenant would be let in. priority:
        as urgent as it may be."""
        self._check(Ask(tenant, priority, 1, 1, 1, 1), outlook, math.inf, now)

    def open(
        self, ask: Ask, holding: Holding, outlook: FleetState, remaining_s: float, now: float
    ) -> AdmissionCharge:
        """holding: of its bytes; it is the Grant's from now on. Raises Refusal, or InvalidArgument
        for a priority the tenant may not have."""
        check_priority(ask.tenant, ask.priority)
        self._check(ask, outlook, remaining_s, now)
        return AdmissionCharge(self, ask, holding, now)

    def fault(self, tenant: Tenant, outlook: FleetState, now: float) -> None:
        """A request was the client's own fault and never let in: it counts as one all the same."""
        self.budgets.count_request(tenant, outlook.others, outlook.replicas, now)

    def cost(self, prompt: int, longest_output: int, choices: int) -> int:
        """What a request is expected to come to, in tokens: outputs rarely are the longest."""
        return prompt + min(longest_output, round(choices * self._output))

    def retry_after_s(self, base_s: float) -> float:
        """Jittered upwards from base_s, so that clients do not all come back at once; bounded."""
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, base_s) * (1 + self._jitter()))

    def ended(self, output: int, choices: int) -> None:
        """So much was generated by a request that ran to its end."""
        self._output += (output / choices - self._output) / 16

    def _check(self, ask: Ask, outlook: FleetState, remaining_s: float, now: float) -> None:
        """What is true before a prompt is encoded."""
        self._check_requests(ask.tenant)
        self._check_tokens(ask.tenant, 1, ask.least_charge, outlook, now)
        if not ask.choices:
            return
        cost = self.cost(ask.least_tokens, ask.longest_output, ask.choices)
        coming = self.approach.ahead(ask.tenant.name, ask.priority)
        self._check_wait(
            ask, ask.least_tokens, cost, outlook, remaining_s, self._drain.wait_s, coming
        )

    def _check_requests(self, tenant: Tenant) -> None:
        if not self.requests.has_room(tenant.name, tenant.weight, 1, self._limits.max_requests):
            raise self.refused(Limit.REQUESTS, "Too many requests are running.")

    def _check_tokens(
        self, tenant: Tenant, requests: int, tokens: int, outlook: FleetState, now: float
    ) -> None:
        most = self._limits.max_tokens or math.inf
        if tokens and not self.tokens.has_room(tenant.name, tenant.weight, tokens, most):
            raise self.refused(Limit.TOKENS, "The running requests take all tokens there are.")
        self._check_budgets(tenant, requests, tokens, outlook, now)

    def _check_budgets(
        self, tenant: Tenant, requests: int, tokens: int, outlook: FleetState, now: float
    ) -> None:
        try:
            self.budgets.check(tenant, requests, tokens, outlook.others, outlook.replicas, now)
        except Refusal as refusal:
            assert refusal.retry_after_s is not None
            refusal.retry_after_s = self.retry_after_s(refusal.retry_after_s)
            raise

    def _check_wait(
        self,
        ask: Ask,
        prompt: int,
        cost: int,
        outlook: FleetState,
        remaining_s: float,
        predict_s: Callable[[float], float],
        coming: int,
    ) -> None:
        """Whether it would get a place in time. With an empty queue it is about to be seen.
        predict_s: how long so many tokens take. coming: tokens that are to be queued before it."""
        if not len(self._queue):
            return
        if not self._queue.has_room(ask.tenant.name, cost):
            raise self.refused(Limit.QUEUE, "The queue is full.")
        ahead = self._queue.ahead(ask.tenant.name, ask.tenant.weight, ask.priority)
        wait_s = predict_s(ahead + coming)
        most_s = self._limits.max_queue_s
        if wait_s + outlook.first_token_s > remaining_s:
            raise self.refused(Limit.DEADLINE, "It could not begin before its deadline.")
        if wait_s > most_s:
            raise self.refused(Limit.WAIT, "It would have to wait for too long.")
        if outlook.kv_tokens is not None:
            moving = (self._drain.tokens_per_s or 0.0) * most_s
            room = outlook.kv_tokens / outlook.replicas + moving
            if not self.unplaced.has_room(ask.tenant.name, ask.tenant.weight, prompt, room):
                raise self.refused(Limit.KV, "There is no memory for more prompts.")

    def refused(self, limit: Limit, message: str) -> Refusal:
        """With when to come back."""
        wait_s = self._drain.wait_s(self._queue.tokens)
        return Refusal(message, retry_after_s=self.retry_after_s(wait_s), limit=limit)


class Holding:
    """Room for the bytes of a request's input, held until it is released, once or more."""

    __slots__ = ("_admission", "_size", "_tenant")

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._size = 0

    def grow(self, size: int) -> None:
        """By so many bytes. Raises Refusal; what is held already stays held."""
        admission, tenant = self._admission, self._tenant
        most = admission._limits.max_input_bytes
        if not admission.input_bytes.has_room(tenant.sharer, tenant.weight, size, most):
            raise admission.refused(Limit.INPUT, "Too much is being received and encoded.")
        admission.input_bytes.take(tenant.sharer, tenant.weight, size)
        self._size += size

    def divided(self, parts: int) -> list[Holding]:
        """So many that hold together what this one held."""
        found = [Holding(self._admission, self._tenant) for _ in range(parts)]
        for number, part in enumerate(found):
            part._size = self._size // parts + (number < self._size % parts)
        self._size = 0
        return found

    def none(self) -> Holding:
        """Of the same tenant, and of nothing: for what this one goes on holding the bytes of."""
        return Holding(self._admission, self._tenant)

    def release(self) -> None:
        size, self._size = self._size, 0
        self._admission.input_bytes.give_back(self._tenant.sharer, size)


class AdmissionCharge:
    """Leave to run one request, and all that is held for it. `release` it, once or more."""

    def __init__(self, admission: Admission, ask: Ask, holding: Holding, now: float) -> None:
        self.cost = 0
        """In the queue's tokens; known once settled."""
        self._admission = admission
        self._ask = ask
        self._holding = holding
        self._charged = 0
        self._prompt = 0
        self._encoded = 0
        """Tokens that a tokenizer has worked on for it, about."""
        self._approach = 0
        if ask.choices:
            self._approach = admission.cost(ask.likely_tokens, ask.longest_output, ask.choices)
            admission.approach.add(ask.tenant.name, ask.priority, self._approach)
        self._unplaced = 0
        self._was_placed = False
        self._released = False
        admission.requests.take(ask.tenant.name, ask.tenant.weight, 1)
        admission.budgets.take(ask.tenant.name, 1, 0, now)
        self._charge(ask.least_charge, now)

    def encoding(self) -> None:
        """A tokenizer begins to work on it."""
        self._encoded = self._encoded or self._ask.likely_tokens

    def encoded(self, tokens: int) -> None:
        """Its prompt has so many tokens, and its bytes are not needed any more."""
        self._encoded = tokens
        self._holding.release()

    def settle(
        self, prompt: int, longest_output: int, outlook: FleetState, remaining_s: float, now: float
    ) -> None:
        """The prompt is encoded, and how long its output can be is known. Raises Refusal; then it
        is still to be released."""
        admission, ask = self._admission, self._ask
        self._holding.release()
        self._approached()
        self._prompt = prompt
        # What is charged already must not stand in its own way.
        charged = self._charged
        self._charge(-charged, now)
        try:
            admission._check_tokens(ask.tenant, 0, prompt + longest_output, outlook, now)
            self.cost = admission.cost(prompt, longest_output, ask.choices)
            least_wait_s = admission._drain.least_wait_s
            admission._check_wait(ask, prompt, self.cost, outlook, remaining_s, least_wait_s, 0)
            charged = prompt + longest_output
        finally:
            self._charge(charged, now)
        self._unplaced = prompt
        admission.unplaced.take(ask.tenant.name, ask.tenant.weight, prompt)

    def placed(self) -> None:
        """Its first attempt has workers."""
        self._was_placed = True
        self._leave_unplaced()

    def release(
        self, output: int, now: float, *, finished: bool = False, at_fault: bool = False
    ) -> None:
        """It is over, with so many output tokens; finished: of its own accord; at_fault: because
        of what its client sent, or because that left: then it pays for what was encoded. Who had
        no place and neither finished nor is at fault gets back all that it was charged."""
        if self._released:
            return
        self._released = True
        self._leave_unplaced()
        self._holding.release()
        self._approached()
        admission, ask = self._admission, self._ask
        if self._was_placed:
            used = self._prompt + output
            unused = max(0, self._charged - used)
        else:
            used = self._encoded if at_fault or (finished and ask.choices) else 0
            unused = self._charged - used
        admission.requests.give_back(ask.tenant.name, 1)
        admission.tokens.give_back(ask.tenant.name, self._charged)
        admission.budgets.release(ask.tenant.name, 1, self._charged, unused, now)
        if self._was_placed:
            admission._queue.settle(ask.tenant.name, ask.priority, self.cost - used)
            if finished:
                admission.ended(output, ask.choices)
        elif not (finished or at_fault):
            admission.budgets.refund_request(ask.tenant.name, now)

    def _charge(self, tokens: int, now: float) -> None:
        """Negative: what was charged is given back."""
        self._charged += tokens
        tenant = self._ask.tenant
        if tokens < 0:
            self._admission.tokens.give_back(tenant.name, -tokens)
        else:
            self._admission.tokens.take(tenant.name, tenant.weight, tokens)
        self._admission.budgets.take(tenant.name, 0, tokens, now)

    def _leave_unplaced(self) -> None:
        unplaced, self._unplaced = self._unplaced, 0
        self._admission.unplaced.give_back(self._ask.tenant.name, unplaced)

    def _approached(self) -> None:
        approach, self._approach = self._approach, 0
        if approach:
            self._admission.approach.remove(self._ask.tenant.name, self._ask.priority, approach)
