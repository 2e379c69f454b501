"""Admission control: budgets, queue, KV capacity and time.

Admission has four steps. `receive` reserves room for the bytes of a request before they are read;
the Holding lasts until its prompt is encoded. `precheck` tests, with nothing known except the
tenant, whether any request could be admitted, so that a refusal costs almost nothing. `open`
charges what is certain before the prompt is encoded: one request, its longest output, and the
fewest tokens that the prompt can have. `settle` charges the exact numbers once the prompt is
encoded. An AdmissionCharge must be released.

Tenants share input bytes, requests, tokens and prompt room in KV memory through `FairBound`: a
tenant that holds little is not refused because of what others hold. A tenant pays, in requests and
in tokens, for requests that fail through its own fault, and not for those that Baton refuses or
fails.

A request that would wait in vain is refused at once: the measured drain rate of the queue predicts
the wait of a new entry. After encoding, a request is refused only when its wait has certainly
become too long. A refusal says when to retry: later for a longer queue, and with jitter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from batonlm.core.admission.fair_queue import DrainRate, FairQueue
from batonlm.core.admission.tenant_budgets import (
    EQUAL_PARTS,
    NO_USE,
    Limit,
    OthersUsage,
    Refusal,
    TenantBudgets,
)
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import InvalidArgument


class FairBound:
    """A bound on what all callers hold together that no caller can exhaust.

    A caller may hold up to `factor` times what is then still free, by its weight (dynamic
    thresholds: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998). One caller alone gets factor / (1 + factor) of the bound. When several are
    greedy, each gets its weight's share as soon as earlier holdings are returned, and some of the
    bound always stays free. A caller that holds nothing is admitted whenever its first amount is
    free.

    The invariant, for callers of equal weight whose amounts are at most M: whatever k others take
    and return, in any order, F = most / (1 + factor)^k - M / factor of the bound stays free of
    them. So a caller that never holds more than factor / (1 + factor) x F is never refused because
    of others.
    """

    def __init__(self, factor: float) -> None:
        self.total = 0
        """What all callers hold together."""
        self._factor = factor
        self._held: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        """Weights of callers that hold something."""
        self._num_of_weight: Counter[float] = Counter()
        """Number of those callers by weight."""

    def held(self, caller: str) -> int:
        return self._held.get(caller, 0)

    def has_room(self, caller: str, weight: float, amount: int, most: float) -> bool:
        """Whether a caller may hold this much more while all may hold `most`. If an amount has no
        room, no larger one has. A caller without a name shares with no one."""
        # A single request is admitted whatever its size; otherwise it could never run.
        if not self.total:
            return True
        left = most - self.total - amount
        held = self._held.get(caller, 0)
        if left < 0 or not (held and caller):
            return left >= 0
        heaviest = max(weight, *self._num_of_weight)
        return held + amount <= self._factor * weight / heaviest * left

    def take(self, caller: str, weight: float, amount: int) -> None:
        """Adds to what a caller holds. The caller checks `has_room` first."""
        if not amount:
            return
        if caller not in self._held:
            self._held[caller] = 0
            self._weights[caller] = weight
            self._num_of_weight[weight] += 1
        self._held[caller] += amount
        self.total += amount

    def give_back(self, caller: str, amount: int) -> None:
        """Returns an amount. The sum of all returns must equal the sum taken."""
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
    """Admitted prompts that are not encoded yet, in tokens as the queue counts them, by tenant and
    priority (smaller is more urgent).

    Without this count a short queue would admit far too many requests: all that arrive while one
    prompt is encoded would see the same room.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, Counter[int]] = {}

    def add(self, tenant: str, priority: int, tokens: int) -> None:
        self._tokens.setdefault(tenant, Counter())[priority] += tokens

    def remove(self, tenant: str, priority: int, tokens: int) -> None:
        """Removes tokens. The sum of all removals must equal the sum added."""
        of_tenant = self._tokens[tenant]
        of_tenant[priority] -= tokens
        if not of_tenant[priority]:
            del of_tenant[priority]
        if not of_tenant:
            del self._tokens[tenant]

    def ahead(self, tenant: str, priority: int) -> int:
        """Returns the tokens of the same tenant that are at least as urgent. Other tenants' prompts
        only take their shares in between, and count once they are queued."""
        of_tenant = self._tokens.get(tenant)
        if of_tenant is None:
            return 0
        return sum(tokens for urgency, tokens in of_tenant.items() if urgency <= priority)

    def __len__(self) -> int:
        """Number of tenants with pending prompts."""
        return len(self._tokens)


MAX_INPUT_BYTES = 32 << 20
"""Most bytes of all requests that are being received or wait to be encoded. They take about three
times as much memory: raw, as text, and as the message to a tokenizer."""

INPUT_FACTOR = 1.0
"""The factor of the FairBound of bytes: one caller alone may hold half of them. One request may be
1/32 of the bound, so the rest must suffice for several such callers."""

HELD_FACTOR = 3.0
"""The factor of the FairBounds of requests, tokens and KV: one tenant alone may hold three
quarters."""

SHORTEST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0
TOKEN_BYTES = 4
"""Typical bytes per prompt token; estimates the length of a prompt before it is encoded."""

FIRST_GUESS = 256.0
"""Initial estimate of the output tokens of a choice."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on all requests of a router together."""

    max_requests: int
    """Running and waiting at the same time."""
    max_tokens: int
    """Of all of them, prompts and longest outputs; 0: no limit."""
    max_queue_s: float
    """The longest predicted wait, in seconds, with which a request is admitted."""
    max_input_bytes: int = MAX_INPUT_BYTES


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state of the fleet at one moment, for one tenant."""

    kv_tokens: int | None = None
    """Positions for which decode workers have free blocks; None: unknown."""
    first_token_s: float = 0.0
    """Typical seconds from placement to the first token."""
    replicas: int = 1
    """Live routers, including this one."""
    others: OthersUsage = NO_USE
    """What the tenant uses through the other routers."""
    models: frozenset[str] = frozenset()
    """Names of the models that are served."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is known about a request before its prompt is encoded."""

    tenant: Tenant
    priority: int
    """Smaller is more urgent."""
    choices: int
    """0 for a request that only encodes or decodes text and gets no worker."""
    least_tokens: int
    """Lower bound of the prompt's tokens."""
    most_tokens: int
    """Upper bound of the prompt's tokens."""
    longest_output: int
    """Tokens of all its choices together; one per choice for a request without max_tokens."""
    encodes: bool = False
    """Whether an encode worker computes its tokens. They are charged as estimated, and exactly when
    it ends: only that worker counts them."""
    model: str = ""
    """The name that it asks for, which need not be a model's."""
    elsewhere: bool = False
    """Whether another Baton runs it: it waits for no worker of this one."""

    @property
    def least_charge(self) -> int:
        if self.encodes:
            return self.likely_tokens
        return self.least_tokens + self.longest_output if self.choices else 0

    @property
    def likely_tokens(self) -> int:
        """The estimated prompt tokens."""
        return max(self.least_tokens, self.most_tokens // TOKEN_BYTES)


def check_priority(tenant: Tenant, priority: int) -> None:
    """Raises InvalidArgument when the priority is more urgent than the tenant may use."""
    if tenant.most_urgent is not None and priority < tenant.most_urgent:
        raise InvalidArgument(
            f"priority must be at least {tenant.most_urgent} with this key (smaller is more "
            "urgent).",
            field="priority",
        )


class Admission:
    """Admits the requests of one router. All times are readings of one clock, in seconds."""

    def __init__(
        self,
        limits: AdmissionLimits,
        queue: FairQueue[Any],
        drain: DrainRate,
        jitter: Callable[[], float],
    ) -> None:
        """jitter: returns a new random number from 0 to 1."""
        self.budgets = TenantBudgets()
        self.input_bytes = FairBound(INPUT_FACTOR)
        self.requests = FairBound(HELD_FACTOR)
        self.tokens = FairBound(HELD_FACTOR)
        """Charged tokens: prompts and longest outputs."""
        self.unplaced = FairBound(HELD_FACTOR)
        """Prompt tokens of admitted requests that are not placed yet."""
        self.approach = PendingEncodes()
        self._limits = limits
        self._queue = queue
        self._drain = drain
        self._jitter = jitter
        self._output = FIRST_GUESS

    def receive(self, tenant: Tenant, size: int, outlook: FleetState, now: float) -> Holding:
        """Reserves room for this many bytes of a request before they are read. Raises Refusal, also
        when the tenant may currently make no request at all."""
        self._check_requests(tenant)
        self._check_budgets(tenant, 1, 0, outlook, now)
        holding = Holding(self, tenant)
        holding.grow(size)
        return holding

    def precheck(self, tenant: Tenant, priority: int, outlook: FleetState, now: float) -> None:
        """Raises Refusal when even the smallest request of the tenant would be refused. priority:
        the most urgent that the request may have."""
        self._check(Ask(tenant, priority, 1, 1, 1, 1), outlook, math.inf, now)

    def open(
        self, ask: Ask, holding: Holding, outlook: FleetState, remaining_s: float, now: float
    ) -> AdmissionCharge:
        """Admits a request before its prompt is encoded. holding: the room of its bytes, which the
        AdmissionCharge takes over. Raises Refusal, or InvalidArgument for a priority that the
        tenant may not use."""
        check_priority(ask.tenant, ask.priority)
        self._check(ask, outlook, remaining_s, now)
        return AdmissionCharge(self, ask, holding, now)

    def fault(self, tenant: Tenant, outlook: FleetState, now: float) -> None:
        """Counts a request that was never admitted because of the client's own fault."""
        self.budgets.count_request(tenant, outlook.others, outlook.replicas, now)

    def cost(self, prompt: int, longest_output: int, choices: int) -> int:
        """Returns the expected tokens of a request. Outputs rarely reach the limit, so their
        average counts."""
        return prompt + min(longest_output, round(choices * self._output))

    @property
    def usual_output(self) -> int:
        """Tokens of a choice of which no limit is known."""
        return round(self._output)

    def retry_after_s(self, base_s: float) -> float:
        """Returns base_s with added jitter, so that clients do not all retry at once; bounded."""
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, base_s) * (1 + self._jitter()))

    def ended(self, output: int, choices: int) -> None:
        """Updates the average output length. output: tokens of a request that ran to its end."""
        self._output += (output / choices - self._output) / 16

    def _check(self, ask: Ask, outlook: FleetState, remaining_s: float, now: float) -> None:
        """The checks that are possible before the prompt is encoded."""
        self._check_requests(ask.tenant)
        self._check_tokens(ask.tenant, 1, ask.least_charge, outlook, now)
        if not ask.choices or ask.elsewhere:
            return
        cost = self.cost(ask.least_tokens, ask.longest_output, ask.choices)
        coming = self.approach.ahead(ask.tenant.name, ask.priority)
        models = (ask.model,) if ask.model in outlook.models else outlook.models
        self._check_wait(
            ask, ask.least_tokens, cost, outlook, remaining_s, self._drain.wait_s, coming, models
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

    def _check_adapter(
        self, account: Tenant, adapter: str, tokens: int, replicas: int, now: float
    ) -> None:
        """Raises Refusal when the account of an adapter has not as many tokens, or no request,
        left. Workers do not report use by adapter, so each router grants its equal part."""
        try:
            self.budgets.check(account, 1, tokens, EQUAL_PARTS, replicas, now)
        except Refusal as refusal:
            assert refusal.retry_after_s is not None
            raise Refusal(
                f"{adapter}: {refusal.message}",
                field="model",
                retry_after_s=self.retry_after_s(refusal.retry_after_s),
                limit=refusal.limit,
            ) from None

    def _check_wait(
        self,
        ask: Ask,
        prompt: int,
        cost: int,
        outlook: FleetState,
        remaining_s: float,
        predict_s: Callable[[float], float],
        coming: int,
        models: Collection[str],
    ) -> None:
        """Raises Refusal when the request would not be placed in time. Where nothing waits for its
        model it is placed next. predict_s: returns the seconds that this many tokens take. coming:
        tokens that will be queued before it. models: those that it may be for."""
        if self._queue.has_idle(models):
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
        """Returns a Refusal with a time to retry."""
        wait_s = self._drain.wait_s(self._queue.tokens)
        return Refusal(message, retry_after_s=self.retry_after_s(wait_s), limit=limit)


class Holding:
    """Reserved room for the bytes of a request's input. A `with` block releases it at its end;
    `release` is idempotent."""

    __slots__ = ("_admission", "_size", "_tenant")

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._size = 0

    def grow(self, size: int) -> None:
        """Reserves more bytes. Raises Refusal; the room already held stays held."""
        admission, tenant = self._admission, self._tenant
        most = admission._limits.max_input_bytes
        if not admission.input_bytes.has_room(tenant.sharer, tenant.weight, size, most):
            raise admission.refused(Limit.INPUT, "Too much is being received and encoded.")
        admission.input_bytes.take(tenant.sharer, tenant.weight, size)
        self._size += size

    def divided(self, parts: int) -> list[Holding]:
        """Splits the room over this many Holdings."""
        found = [Holding(self._admission, self._tenant) for _ in range(parts)]
        for number, part in enumerate(found):
            part._size = self._size // parts + (number < self._size % parts)
        self._size = 0
        return found

    def none(self) -> Holding:
        """Returns an empty Holding of the same tenant, for a request whose bytes this one keeps
        holding."""
        return Holding(self._admission, self._tenant)

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        size, self._size = self._size, 0
        self._admission.input_bytes.give_back(self._tenant.sharer, size)


class AdmissionCharge:
    """The admission of one request and all that is held for it. `release` is idempotent."""

    def __init__(self, admission: Admission, ask: Ask, holding: Holding, now: float) -> None:
        self.cost = 0
        """In the queue's tokens; set by `settle`."""
        self._admission = admission
        self._ask = ask
        self._holding = holding
        self._charged = 0
        self._prompt = 0
        self._encoded = 0
        """Approximate tokens that a tokenizer has processed for the request."""
        self._approach = 0
        if ask.choices and not ask.elsewhere:
            self._approach = admission.cost(ask.likely_tokens, ask.longest_output, ask.choices)
            admission.approach.add(ask.tenant.name, ask.priority, self._approach)
        self._unplaced = 0
        self._was_placed = False
        self._released = False
        self._of_adapter: Tenant | None = None
        """The account of the adapter that it runs with, if that has limits; set by `settle`."""
        admission.requests.take(ask.tenant.name, ask.tenant.weight, 1)
        admission.budgets.take(ask.tenant.name, 1, 0, now)
        self._charge(ask.least_charge, now)

    def encoding(self) -> None:
        """A tokenizer starts to encode the prompt."""
        self._encoded = self._encoded or self._ask.likely_tokens

    def encoded(self, tokens: int) -> None:
        """The prompt has this many tokens. Its bytes are released."""
        self._encoded = tokens
        self._holding.release()

    def settle(
        self,
        prompt: int,
        longest_output: int,
        outlook: FleetState,
        remaining_s: float,
        now: float,
        model: str = "",
        adapter: str = "",
    ) -> None:
        """Charges the exact prompt and its longest output, in tokens. model: the one that runs it.
        adapter: the name of the one that it runs with. Raises Refusal; the charge must be released
        then, too."""
        admission, ask = self._admission, self._ask
        self._holding.release()
        self._approached()
        self._prompt = prompt
        # The amount already charged must not count against the request itself.
        charged = self._charged
        self._charge(-charged, now)
        try:
            admission._check_tokens(ask.tenant, 0, prompt + longest_output, outlook, now)
            if not ask.elsewhere:
                self.cost = admission.cost(prompt, longest_output, ask.choices)
                least_wait_s = admission._drain.least_wait_s
                admission._check_wait(
                    ask, prompt, self.cost, outlook, remaining_s, least_wait_s, 0, (model,)
                )
            charged = prompt + longest_output
            account = ask.tenant.of_adapter(adapter) if adapter else None
            if account is not None:
                admission._check_adapter(account, adapter, charged, outlook.replicas, now)
                admission.budgets.take(account.name, 1, charged, now)
                self._of_adapter = account
        finally:
            self._charge(charged, now)
        if not ask.elsewhere:
            self._unplaced = prompt
            admission.unplaced.take(ask.tenant.name, ask.tenant.weight, prompt)

    def placed(self) -> None:
        """The first attempt has workers."""
        self._was_placed = True
        self._leave_unplaced()

    def release(
        self, output: int, now: float, *, finished: bool = False, at_fault: bool = False
    ) -> None:
        """Ends the charge. output: generated tokens. finished: the request ended normally.
        at_fault: it failed because of what its client sent or because the client left, and pays for
        what was encoded. A request that was not placed, did not finish and is not at fault gets a
        full refund."""
        if self._released:
            return
        self._released = True
        self._leave_unplaced()
        self._holding.release()
        self._approached()
        admission, ask = self._admission, self._ask
        if self._was_placed:
            used = self._prompt + output
            # Negative where the longest output was not known, as of a model at another Baton.
            unused = self._charged - used
        else:
            pays = ask.choices or ask.encodes
            used = self._encoded if at_fault or (finished and pays) else 0
            unused = self._charged - used
        admission.requests.give_back(ask.tenant.name, 1)
        admission.tokens.give_back(ask.tenant.name, self._charged)
        accounts = [ask.tenant.name, *([self._of_adapter.name] if self._of_adapter else [])]
        for account in accounts:
            admission.budgets.release(account, 1, self._charged, unused, now)
        if self._was_placed and not ask.elsewhere:
            admission._queue.settle(ask.tenant.name, ask.priority, self.cost - used)
            if finished:
                admission.ended(output, ask.choices)
        elif not (self._was_placed or finished or at_fault):
            for account in accounts:
                admission.budgets.refund_request(account, now)

    def _charge(self, tokens: int, now: float) -> None:
        """Charges tokens; a negative number refunds them."""
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
