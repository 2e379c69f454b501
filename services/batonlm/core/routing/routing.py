"""Chooses the workers of an attempt: filter, score, pick, as pure functions over worker snapshots.

Conditional disaggregation: a prompt gets a separate prefill worker when that takes less time in
total, for the attempt and for the sequences that it slows down, by the workers' measured speeds.
Without measurements, a long enough prompt gets one. The router waits for a prefill worker that is
merely busy: its load must not spill over into decode's steps.

Where the operator allows it, the worker that computes an input first collects the beginning of it
from another one's cache, if it is predicted to have it in half the time that computing takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from batonlm.core.handover.fit import difference
from batonlm.core.kvcache.prefix import UNIT_TOKENS
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.load import NOMINAL, WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.prefix_index import NO_OVERLAP, Overlap

SEQUENCE_S = 0.0016
"""Seconds that a sequence on a worker counts in addition to its measured cost, so that sequences
spread even over workers for which one more costs almost nothing."""

SHORTAGE_COST = 8
"""A position without a free block counts as this many prefilled positions: memory takes precedence
over queues."""

EXPECTED_OUTPUT = 128
"""Output tokens that are assumed for a request without a smaller limit."""

NOISE = 0.2
"""Step times that differ from the median worker's by up to this share count as equal: over a whole
output, random differences would outweigh what a worker has cached."""

COLLECT_S = 0.05
"""Seconds of a collected prefix besides its transfer, while no worker has measured them."""

COLLECT_GAIN = 2.0
"""Computing must be predicted to take this many times as long as collecting: neither prediction is
exact, and a collected prefix also costs its giver."""

NEW_SHARE = 0.1
"""The initial share of a new worker. The share grows to 1 while the worker is new, and its load
counts as that much larger, so that it gets about that share of what others get. The attempt's own
cost is not scaled: among idle workers a new one is as good as the others, and a fleet of new
workers only is used fully."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. Empty strings match anything."""

    request_id: str
    input_tokens: int
    """Tokens of the prompt and of the accepted output."""
    choices: int
    needs_decode: bool
    """False: every choice ends at token 0."""
    model: str = ""
    model_digest: str = ""
    tokenizer_digest: str = ""
    adapter: str = ""
    """The digest of the LoRA adapter that its workers must have; "": none is needed."""
    failed: frozenset[str] = frozenset()
    """Instance ids that recently lost an attempt of this request."""
    busy: frozenset[str] = frozenset()
    """Instance ids that recently refused one as overloaded."""
    ejected: frozenset[str] = frozenset()
    """Instance ids whose circuit breaker is open."""
    quarantined: frozenset[str] = frozenset()
    """Instance ids that run a suspect; set when the attempt's request is a suspect, too."""
    prefix_hashes: bytes = b""
    """Hashes of the prompt's units."""
    output_tokens: int = EXPECTED_OUTPUT
    """The most output tokens that are expected."""
    scored: bool = False
    """Whether all its tokens are scored, for which nothing that is cached is of use."""
    not_giving: frozenset[str] = frozenset()
    """Instance ids from which a prefix did not come a moment ago."""
    not_collecting: frozenset[str] = frozenset()
    """Instance ids that did not collect one when asked to, as those of older versions."""


class PrefixPlan(NamedTuple):
    """The beginning of an input that a worker is to collect from the cache of another one."""

    sender: WorkerIdentity
    num_tokens: int
    """How many tokens of the input it has."""
    collect_s: float
    """The predicted seconds until it is here."""


class PrefixHolder(NamedTuple):
    """A worker that may give the beginning of an input from its cache."""

    num_tokens: int
    worker: WorkerSnapshot


class Cost(NamedTuple):
    """The predicted cost of an attempt on a worker, in seconds, by cause.

    All seconds count equally: those that the attempt waits and those by which it delays running
    sequences. Tokens that a worker has cached cost nothing.
    """

    total: float
    """The value that is compared."""
    queue_s: float
    """Until the first token, caused by the work ahead of the attempt."""
    compute_s: float
    """Until the first token, caused by the attempt's own uncached tokens."""
    crowd_s: float
    """The decode steps of its output, shared with the other sequences there."""
    harm_s: float
    """The delay of others: running sequences, or hand-overs over the same link."""
    shortage_s: float
    """For blocks that are not free."""
    share: float
    """Below 1 for a new worker."""
    uncached_tokens: int
    """The tokens that are computed there."""
    collect_s: float = 0.0
    """Until a prefix has come from another worker's cache, or from a tier of its own."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is the same for all workers during one decision."""

    overlap: Overlap
    now: float
    slow_start_s: float
    """Seconds for which a worker counts as new."""
    default_speed: WorkerSpeed
    """A median speed, used for a worker that has not measured its own."""
    first_met: float = 0.0
    """When the oldest worker was first seen."""
    holders: Sequence[PrefixHolder] = ()
    """Those that have most of the input first."""
    least_collected: int = 0
    """See `RoutingPolicy.collect_prefix_tokens`."""
    tiers: Overlap = NO_OVERLAP
    """What the workers' tiers hold."""


def uncached_tokens(demand: Demand, worker: WorkerSnapshot, overlap: Overlap) -> int:
    """Returns the input tokens that the worker would compute, at least one."""
    return max(1, demand.input_tokens - UNIT_TOKENS * overlap.units(worker.number))


def restored(
    demand: Demand, worker: WorkerSnapshot, moment: Moment, speed: WorkerSpeed
) -> tuple[int, float]:
    """Returns how many tokens of the input the worker has in its cache or brings back there from
    its tiers, and the seconds that this takes. No more than is quicker than computing it."""
    most = demand.input_tokens - 1
    own = known = min(most, UNIT_TOKENS * moment.overlap.units(worker.number))
    best, seconds = (own, 0.0), 0.0
    for tier, number in worker.tiers:
        there = min(most, UNIT_TOKENS * moment.tiers.units(number))
        if there > known:
            num_bytes = (there - known) * worker.kv_bytes_per_position
            seconds += num_bytes / speed.tier_bytes_per_s(tier)
            known = there
            if seconds <= speed.prefill_s(own, known):
                best = (known, seconds)
    return best


def prefill_cost(
    demand: Demand, worker: WorkerSnapshot, moment: Moment, plan: PrefixPlan | None = None
) -> Cost:
    """Returns the cost of computing the input on the worker, behind what is collected by the plan,
    and handing its KV over."""
    known = worker.load.speed
    speed = known if known.prefills else moment.default_speed
    own, collect_s = restored(demand, worker, moment, speed)
    uncached = demand.input_tokens - own
    if plan is not None:
        uncached, collect_s = demand.input_tokens - plan.num_tokens, plan.collect_s
    share, sequences = _share(worker, moment), worker.num_sequences
    queue_s = speed.queue_s(worker.waiting_tokens, sequences)
    compute_s = speed.prefill_s(demand.input_tokens - uncached, demand.input_tokens)
    crowd_s = SEQUENCE_S * (sequences / share + demand.choices)
    shortage_s = _shortage_s(demand, worker, speed)
    total = queue_s / share + compute_s + crowd_s + shortage_s + collect_s
    return Cost(total, queue_s, compute_s, crowd_s, 0.0, shortage_s, share, uncached, collect_s)


def prefix_plan(demand: Demand, worker: WorkerSnapshot, moment: Moment) -> PrefixPlan | None:
    """Returns from which worker's cache a worker that computes the input should collect its
    beginning first; None: from none."""
    if not moment.holders or worker.identity.instance_id in demand.not_collecting:
        return None
    # Who holds most may be full and so no candidate, and yet the only one that has measured.
    median = default_speed([worker, *(holder.worker for holder in moment.holders)])
    speed = worker.load.speed.or_else(median)
    own, restore_s = restored(demand, worker, moment, speed)
    for known, holder in moment.holders:
        if known <= own or known - own < moment.least_collected:
            return None
        if not _can_give(holder, worker):
            continue
        rates = (each.link_bytes_per_s for each in (speed, median, NOMINAL))
        num_bytes = (known - own) * worker.kv_bytes_per_position
        collect_s = (speed.handover_s or COLLECT_S) + num_bytes / next(filter(None, rates))
        computed_s = speed.prefill_s(own, known)
        if moment.least_collected > 0 or collect_s * COLLECT_GAIN <= computed_s:
            return PrefixPlan(holder.identity, known, restore_s + collect_s)
    return None


def decode_costs(
    demand: Demand, worker: WorkerSnapshot, moment: Moment, plan: PrefixPlan | None = None
) -> tuple[Cost, Cost]:
    """Returns the costs of decoding on the worker: with the input computed there, behind what is
    collected by the plan, and with KV from another worker."""
    speed = worker.load.speed.or_else(moment.default_speed)
    uncached = uncached_tokens(demand, worker, moment.overlap)
    share, sequences = _share(worker, moment), worker.num_sequences
    waiting, used = worker.waiting_tokens, worker.used_positions
    rows = sequences / share + demand.choices
    context = used / share + demand.choices * demand.input_tokens
    output = min(demand.output_tokens, EXPECTED_OUTPUT)
    step_s = _plain(speed.decode_s(rows, context), moment.default_speed.decode_s(rows, context))
    crowd_s = SEQUENCE_S * rows + output * step_s
    shortage_s = _shortage_s(demand, worker, speed)
    queue_s = speed.queue_s(waiting, sequences)
    link_s = _link_s(worker, uncached, moment)
    total = queue_s / share + crowd_s + shortage_s + link_s
    collecting = Cost(total, queue_s, 0.0, crowd_s, link_s, shortage_s, share, uncached)
    own, collect_s = restored(demand, worker, moment, speed)
    uncached = demand.input_tokens - own
    if plan is not None:
        uncached, collect_s = demand.input_tokens - plan.num_tokens, plan.collect_s
    added_s = speed.prefill_s(demand.input_tokens - uncached, demand.input_tokens)
    # A chunk shares its steps with running sequences; alone it is larger.
    step_s = speed.decode_s(sequences, used)
    queue_s += speed.prefill_steps(waiting) * step_s
    compute_s = added_s + (speed.prefill_steps(uncached) if sequences else 1) * step_s
    harm_s = added_s * worker.load.running_sequences
    total = queue_s / share + compute_s + harm_s + crowd_s + shortage_s + collect_s
    local = Cost(total, queue_s, compute_s, crowd_s, harm_s, shortage_s, share, uncached, collect_s)
    return local, collecting


def handover_tail_s(
    demand: Demand, prefill: WorkerSnapshot, receiver: WorkerSnapshot, uncached: int
) -> float:
    """Returns the seconds after token 0 until the receiver has the KV that prefill computed."""
    speed = prefill.load.speed
    chunk = min(uncached, speed.prefill_step_tokens or uncached)
    num_bytes = (chunk + receiver.state_positions) * receiver.kv_bytes_per_position
    return receiver.load.speed.handover_tail_s(num_bytes)


def shortage(demand: Demand, worker: WorkerSnapshot) -> int:
    """Returns the positions that would have no free block."""
    wanted = worker.positions_taken(demand.input_tokens, demand.choices)
    return max(0, wanted - worker.free_positions)


def _shortage_s(demand: Demand, worker: WorkerSnapshot, speed: WorkerSpeed) -> float:
    return SHORTAGE_COST * shortage(demand, worker) * speed.prefill_position_s


def _link_s(worker: WorkerSnapshot, uncached: int, moment: Moment) -> float:
    """Returns the seconds for which the missing KV occupies the worker's link. The attempt itself
    hardly waits, because most KV is transferred while the prompt is computed."""
    speeds = (worker.load.speed, moment.default_speed, NOMINAL)
    rate = next(speed.link_bytes_per_s for speed in speeds if speed.link_bytes_per_s)
    return (uncached + worker.state_positions) * worker.kv_bytes_per_position / rate


def _plain(own_s: float, middling_s: float) -> float:
    return middling_s if abs(own_s - middling_s) <= NOISE * middling_s else own_s


def _share(worker: WorkerSnapshot, moment: Moment) -> float:
    if moment.slow_start_s <= 0.0:
        return 1.0
    return _grown(worker.since, moment) / _grown(moment.first_met, moment)


def _grown(since: float, moment: Moment) -> float:
    return min(1.0, max(NEW_SHARE, (moment.now - since) / moment.slow_start_s))


MAX_DRAWN = 12
"""Workers that are drawn from a large pool. The best of this many is among the pool's best tenth in
almost three of four cases."""

MAX_HOLDERS = 6


class PoolSnapshot(NamedTuple):
    """Workers of one role, and what they hold of the prompt."""

    workers: Sequence[WorkerSnapshot]
    overlap: Overlap = NO_OVERLAP
    missing: bool = False
    """Whether an expected worker that is no standby takes no work: it is silent, gone, draining, or
    starting."""
    tiers: Overlap = NO_OVERLAP
    """What their tiers hold of the prompt."""


class FilterReason(Enum):
    """The result of filtering a candidate."""

    PICKED = "picked"
    OUTSCORED = "outscored"
    NOT_SERVING = "not serving"
    OTHER_MODEL = "serves another model"
    OTHER_TOKENIZER = "has another tokenizer"
    NO_ADAPTER = "does not have the adapter"
    FAILED_BEFORE = "failed this request a moment ago"
    BUSY = "is full, or refused this request as overloaded a moment ago"
    EJECTED = "its circuit breaker is open"
    QUARANTINED = "another suspect runs there"
    STANDS_BY = "stands by, and no other is missing"
    OTHER_LAYOUT = "its KV does not fit the decode worker"


PASSING = (FilterReason.BUSY, FilterReason.QUARANTINED)
"""Reasons that pass: the router waits for such a prefill worker."""


class Candidate(NamedTuple):
    """A worker that was considered, and why it was or was not picked."""

    identity: WorkerIdentity
    filter_reason: FilterReason
    cost: Cost | None = None
    """None when the worker was filtered."""
    detail: str = ""


class Filtered(NamedTuple):
    """Workers that can run the attempt, and the results for the others that were considered."""

    fitting: Sequence[WorkerSnapshot]
    others: Sequence[Candidate]


class ScoredWorker(NamedTuple):
    """A worker that can run the attempt, and its cost."""

    cost: Cost
    worker: WorkerSnapshot
    plan: PrefixPlan | None = None
    """With which the cost is predicted."""


def filtered(
    demand: Demand, pool: PoolSnapshot, receiver: WorkerSnapshot | None = None
) -> Filtered:
    """Returns the workers of a pool that can run an attempt.

    Of a large pool a sample is considered: the workers that hold most of the prompt, and some drawn
    by the request's id; all workers when none of the sample fits. Drawing also keeps routers with
    equally old reports from all picking the one worker that looked best; what a router placed
    itself counts at once (`WorkerSnapshot.fresh_tokens`).

    A standby is a candidate in two cases only:

        another of its pool is missing      it counts as a normal worker until that one is back
        no other could run the attempt,     it takes what would fail or wait in vain
        not even once it is less busy

    A pool that is merely busy gets no help, because a standby is reserved for deaths. receiver: the
    worker that takes the KV, if any.
    """
    some = _some(demand, pool)
    found = _sift(demand, some, receiver, pool.missing)
    if len(some) < len(pool.workers) and all(worker.standby for worker in found.fitting):
        return _sift(demand, pool.workers, receiver, pool.missing)
    return found


def ranked(demand: Demand, scored: Iterable[ScoredWorker]) -> list[ScoredWorker]:
    """Sorts scored workers, best first. Equal ones are in the order of a hash of request and
    worker, so that requests spread without a counter."""
    ranked = sorted(scored, key=_total)
    best = [entry for entry in ranked if entry.cost.total == ranked[0].cost.total]
    if len(best) > 1:
        best.sort(key=lambda entry: tie_break(demand.request_id, entry.worker.identity))
        ranked[: len(best)] = best
    return ranked


def tie_break(request_id: str, worker: WorkerIdentity) -> bytes:
    """Returns the sort key of a worker among equally good ones; the order differs by request."""
    return blake2b(f"{request_id} {worker.instance_id}".encode(), digest_size=8).digest()


def candidates_of(ranked: Sequence[ScoredWorker], *, picked: bool = True) -> tuple[Candidate, ...]:
    """Returns the results for scored workers, as candidates."""
    fates = [FilterReason.OUTSCORED] * len(ranked)
    if picked and fates:
        fates[0] = FilterReason.PICKED
    return tuple(
        Candidate(
            entry.worker.identity, filter_reason, entry.cost, "a standby" * entry.worker.standby
        )
        for filter_reason, entry in zip(fates, ranked, strict=True)
    )


def default_speed(workers: Sequence[WorkerSnapshot]) -> WorkerSpeed:
    """Returns the speed for a worker that has not measured its own: for each kind of work the
    median of those that have."""
    speeds = [worker.load.speed for worker in workers]
    prefilling = sorted((s for s in speeds if s.prefills), key=lambda s: s.prefill_position_s)
    decoding = sorted((s for s in speeds if s.decodes), key=lambda s: s.step_s)
    found = prefilling[len(prefilling) // 2] if prefilling else NOMINAL
    if decoding:
        found = found.with_decode_of(decoding[len(decoding) // 2])
    return found


def _some(demand: Demand, pool: PoolSnapshot) -> Sequence[WorkerSnapshot]:
    workers = pool.workers
    if len(workers) <= MAX_DRAWN + MAX_HOLDERS:
        return workers
    draw = Random(demand.request_id)
    chosen = set(draw.sample(range(len(workers)), MAX_DRAWN))
    holders = pool.overlap.most(MAX_HOLDERS, draw.randrange(len(workers)))
    tiers = pool.tiers.most(MAX_HOLDERS, 0)
    if holders or tiers:
        chosen.update(
            i
            for i, worker in enumerate(workers)
            if worker.number in holders or any(number in tiers for _, number in worker.tiers)
        )
    return [workers[i] for i in chosen]


def _sift(
    demand: Demand,
    workers: Iterable[WorkerSnapshot],
    receiver: WorkerSnapshot | None,
    missing: bool,
) -> Filtered:
    fitting: list[WorkerSnapshot] = []
    others: list[Candidate] = []
    at_work = False
    for worker in workers:
        filter_reason, detail = _filter_reason(demand, worker, receiver)
        if filter_reason is None:
            fitting.append(worker)
        else:
            others.append(Candidate(worker.identity, filter_reason, detail=detail))
        at_work = at_work or (
            not worker.standby and (filter_reason is None or filter_reason in PASSING)
        )
    if at_work and not missing:
        others += [Candidate(w.identity, FilterReason.STANDS_BY) for w in fitting if w.standby]
        fitting = [worker for worker in fitting if not worker.standby]
    return Filtered(fitting, others)


def _filter_reason(
    demand: Demand, worker: WorkerSnapshot, receiver: WorkerSnapshot | None
) -> tuple[FilterReason | None, str]:
    """Returns why the worker cannot be used at all, or None."""
    instance_id = worker.identity.instance_id
    if worker.load.state is not WorkerState.SERVING:
        return FilterReason.NOT_SERVING, worker.load.state.name.lower()
    if not _fits(demand.model, worker.model.name) or not _fits(
        demand.model_digest, worker.model.digest
    ):
        return FilterReason.OTHER_MODEL, worker.model.name
    if not _fits(demand.tokenizer_digest, worker.model.tokenizer_digest):
        return FilterReason.OTHER_TOKENIZER, worker.model.tokenizer_digest
    if demand.adapter and demand.adapter not in worker.adapters:
        return FilterReason.NO_ADAPTER, demand.adapter
    if receiver is not None and receiver.layout is not None:
        misfit = _misfit(worker, receiver)
        if misfit:
            return FilterReason.OTHER_LAYOUT, misfit
    if instance_id in demand.failed:
        return FilterReason.FAILED_BEFORE, ""
    if instance_id in demand.busy:
        return FilterReason.BUSY, ""
    if instance_id in demand.ejected:
        return FilterReason.EJECTED, ""
    if instance_id in demand.quarantined:
        return FilterReason.QUARANTINED, ""
    return None, ""


def _misfit(worker: WorkerSnapshot, receiver: WorkerSnapshot) -> str:
    same_ways = worker.transports == receiver.transports
    if same_ways and worker.layout is not None and worker.layout == receiver.layout:
        return ""
    return difference(worker.layout, worker.transports, receiver.layout, receiver.transports)


def _fits(wanted: str, offered: str) -> bool:
    return not wanted or not offered or wanted == offered


def _total(entry: ScoredWorker) -> float:
    return entry.cost.total


SHORT_INPUT = 32
"""Most uncached tokens of an input that is prefilled on decode while speeds are unknown."""

ALONE = "every choice ends at token 0"
SHORT = "short enough to prefill on decode"
NO_PREFILL = "no prefill worker fits: prefill on decode"
CHEAPER = "prefilling on decode takes less time"
APART = "prefill and decode apart"
MOVES = "its KV moves here from another decode worker"
RETURNS = "its KV is still here, because it did not arrive at another decode worker"
ADOPTS = "it runs here for a router that is gone"
"""One of the reasons of decisions that say where an attempt runs."""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """The operator's settings for routing."""

    local_prefill_tokens: int = -1
    """Inputs with at most this many uncached tokens are prefilled on decode; below 0: inputs for
    which that takes less time."""
    slow_start_s: float = 0.0
    """Seconds for which a worker counts as new."""
    collect_prefix_tokens: int = 0
    """Least tokens by which another worker's cache must have more of an input for them to be
    collected from there; below 0: as many as take less time to collect; 0: none are."""

    @property
    def by_speed(self) -> bool:
        return self.local_prefill_tokens < 0

    @property
    def short(self) -> int:
        """Inputs with at most this many uncached tokens never wait for a prefill worker."""
        return SHORT_INPUT if self.by_speed else self.local_prefill_tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """Where an attempt runs, and why. At least one of `prefill` and `decode` is set; otherwise
    `wait` is true."""

    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    reason: str
    """One sentence on the shape of the decision."""
    candidates: tuple[Candidate, ...]
    uncached_tokens: int = 0
    """Tokens that the prefilling worker will compute."""
    first_token_s: float | None = None
    """Predicted seconds; None when that worker has not measured its speed."""
    local_s: float | None = None
    """The compared seconds on decode alone; None when not compared."""
    remote_s: float | None = None
    """The compared seconds with prefill and decode apart; None when not compared."""
    plan: PrefixPlan | None = None
    """What the prefilling worker collects before it computes."""

    @property
    def wait(self) -> bool:
        return self.prefill is None and self.decode is None

    @property
    def reason_to_collect(self) -> str:
        """Why an attempt does not run where its prefix is: there it is busy, or excluded, or was
        predicted to take longer."""
        if self.plan is not None:
            for candidate in self.candidates:
                if candidate.identity == self.plan.sender:
                    return candidate.filter_reason.name.lower()
        return "unknown"

    def lines(self) -> list[str]:
        """Returns the decision as text, line by line."""
        lines = [self.reason]
        if self.local_s is not None and self.remote_s is not None:
            lines[0] += f": {self.local_s:.4f} s on decode, {self.remote_s:.4f} s apart"
        for identity, filter_reason, cost, detail in self.candidates:
            words = [f"{identity.role} {identity.instance_id[:8]}: {filter_reason.value}", detail]
            if cost is not None:
                words += [f"{name} {value:.4g}" for name, value in cost._asdict().items()]
            lines.append(" ".join(filter(None, words)))
        return lines


def decide(
    demand: Demand,
    prefills: PoolSnapshot,
    decodes: PoolSnapshot,
    policy: RoutingPolicy,
    now: float = 0.0,
) -> Decision:
    """Filters, scores and picks. now: on the clock of `WorkerSnapshot.since`."""
    holders = prefix_holders(demand, (decodes, prefills), policy)
    if not demand.needs_decode:
        alone = _prefill(demand, prefills, policy, now, holders)
        if alone.best is not None:
            return _on_prefill(alone, None, ALONE)
    found = filtered(demand, decodes)
    moment = _moment(decodes, found.fitting, policy, now, holders)
    costs = []
    locally = []
    for worker in found.fitting:
        plan = prefix_plan(demand, worker, moment)
        cost = decode_costs(demand, worker, moment, plan)
        costs.append((cost, worker))
        locally.append(ScoredWorker(cost[0], worker, plan))
    local = ranked(demand, locally)
    here = _Choice(local, found.others)
    if here.best is None:
        return Decision(None, None, "no decode worker can take it", here.candidates())
    short = here.best.cost.uncached_tokens <= policy.short
    if short and not policy.by_speed:
        return _on_decode(here, None, SHORT)
    collecting = ranked(demand, [ScoredWorker(cost[1], worker) for cost, worker in costs])
    there = _Choice(collecting, found.others)
    assert there.best is not None
    apart = _prefill(demand, prefills, policy, now, holders, there.best.worker)
    if apart.best is None:
        if not short and any(candidate.filter_reason in PASSING for candidate in apart.others):
            seen = (*here.candidates(picked=False), *apart.candidates())
            return Decision(None, None, "every prefill worker that fits is busy", seen)
        return _on_decode(here, apart, NO_PREFILL)
    times = _compared(demand, here.best, there.best, apart.best) if policy.by_speed else None
    if times is None and short:
        return _on_decode(here, apart, SHORT)
    if times is not None and times[0] <= times[1]:
        return _on_decode(here, apart, CHEAPER, times)
    return _on_prefill(apart, there, APART, times)


def receiver_for(
    demand: Demand, decodes: Iterable[WorkerSnapshot], sender: WorkerSnapshot
) -> WorkerIdentity | None:
    """Returns a worker where running sequences can continue with their KV. None: no worker has room
    for all of them now, and they stay where they are."""
    if sender.layout is None:
        return None
    roomy = [w for w in decodes if not shortage(demand, w) and _has_places(demand, w)]
    leaving = sender.load.state is not WorkerState.SERVING
    fitting = filtered(demand, PoolSnapshot(roomy, missing=leaving), sender).fitting
    moment = Moment(NO_OVERLAP, 0.0, 0.0, default_speed(fitting))
    found = ranked(demand, [ScoredWorker(decode_costs(demand, w, moment)[1], w) for w in fitting])
    return found[0].worker.identity if found else None


def is_stalled(step_age_us: int, step_predicted_us: int) -> bool:
    """Whether a worker's running step is so old that the worker counts as dead. Arguments in
    microseconds."""
    return step_age_us > max(2_000_000, 3 * step_predicted_us)


class _Choice(NamedTuple):
    """The result for one pool: workers that can run the attempt, best first, and the results for
    the others."""

    scored: Sequence[ScoredWorker]
    others: Sequence[Candidate]

    @property
    def best(self) -> ScoredWorker | None:
        return self.scored[0] if self.scored else None

    def candidates(self, *, picked: bool = True) -> tuple[Candidate, ...]:
        return (*candidates_of(self.scored, picked=picked), *self.others)


def _prefill(
    demand: Demand,
    pool: PoolSnapshot,
    policy: RoutingPolicy,
    now: float,
    holders: Sequence[PrefixHolder],
    receiver: WorkerSnapshot | None = None,
) -> _Choice:
    found = filtered(demand, pool, receiver)
    moment = _moment(pool, found.fitting, policy, now, holders)
    costs = []
    for worker in found.fitting:
        plan = prefix_plan(demand, worker, moment)
        costs.append(ScoredWorker(prefill_cost(demand, worker, moment, plan), worker, plan))
    return _Choice(ranked(demand, costs), found.others)


def _moment(
    pool: PoolSnapshot,
    fitting: Sequence[WorkerSnapshot],
    policy: RoutingPolicy,
    now: float,
    holders: Sequence[PrefixHolder],
) -> Moment:
    first_met = min((worker.since for worker in fitting), default=now)
    return Moment(
        pool.overlap,
        now,
        policy.slow_start_s,
        default_speed(fitting),
        first_met,
        holders,
        policy.collect_prefix_tokens,
        pool.tiers,
    )


def prefix_holders(
    demand: Demand, pools: Iterable[PoolSnapshot], policy: RoutingPolicy
) -> Sequence[PrefixHolder]:
    """Returns the workers that may give a prefix, those that have most of the input first; none
    unless the policy allows it."""
    least = policy.collect_prefix_tokens
    if not least or demand.scored:
        return ()
    withheld = demand.failed | demand.ejected | demand.not_giving
    holders = []
    for pool in pools:
        numbers = pool.overlap.most(MAX_HOLDERS, 0)
        for worker in pool.workers:
            if worker.number in numbers and worker.identity.instance_id not in withheld:
                units = pool.overlap.units(worker.number)
                known = min(UNIT_TOKENS * units, demand.input_tokens - 1)
                holders.append(PrefixHolder(known, worker))
    if least < 0 and not any(holder.worker.load.speed.prefills for holder in holders):
        return ()
    return sorted(holders, key=lambda holder: -holder.num_tokens)


def _can_give(holder: WorkerSnapshot, worker: WorkerSnapshot) -> bool:
    """Whether a worker computes the same KV as another one, and its KV can move there. What layers
    keep as a state is in no prefix."""
    return (
        holder.identity != worker.identity
        and holder.load.state in (WorkerState.SERVING, WorkerState.DRAINING)
        and holder.model.digest == worker.model.digest
        and holder.exact == worker.exact
        and holder.layout is not None
        and not holder.state_positions
        and not _misfit(holder, worker)
    )


def _compared(
    demand: Demand, here: ScoredWorker, there: ScoredWorker, apart: ScoredWorker
) -> tuple[float, float] | None:
    """Returns the seconds on decode alone and with prefill and decode apart; None when a speed is
    unknown."""
    decode, receiver, prefill = (entry.worker.load.speed for entry in (here, there, apart))
    if not (decode.prefills and prefill.prefills and receiver.handover_s):
        return None
    tail_s = handover_tail_s(demand, apart.worker, there.worker, apart.cost.uncached_tokens)
    # KV on the link delays no computation; only the tail is waited for.
    collecting_s = there.cost.total - there.cost.harm_s
    return here.cost.total, apart.cost.total + tail_s + collecting_s


def _on_decode(
    here: _Choice, apart: _Choice | None, reason: str, times: tuple[float, float] | None = None
) -> Decision:
    """Decides for prefill and decode on one worker. apart: the result for the prefill pool, if
    considered."""
    seen = (
        here.candidates()
        if apart is None
        else (*here.candidates(), *apart.candidates(picked=False))
    )
    return _decision(None, here.best, here.best, reason, seen, times)


def _on_prefill(
    apart: _Choice, there: _Choice | None, reason: str, times: tuple[float, float] | None = None
) -> Decision:
    """Decides for a separate prefill worker. there: the result for the decode pool, if it is
    needed."""
    decode = None if there is None else there.best
    seen = apart.candidates() if there is None else (*there.candidates(), *apart.candidates())
    return _decision(apart.best, decode, apart.best, reason, seen, times)


def _decision(
    prefill: ScoredWorker | None,
    decode: ScoredWorker | None,
    computing: ScoredWorker | None,
    reason: str,
    seen: tuple[Candidate, ...],
    times: tuple[float, float] | None,
) -> Decision:
    assert computing is not None
    cost, measured = computing.cost, computing.worker.load.speed.prefills
    return Decision(
        prefill=None if prefill is None else prefill.worker.identity,
        decode=None if decode is None else decode.worker.identity,
        reason=reason,
        candidates=seen,
        uncached_tokens=cost.uncached_tokens,
        first_token_s=cost.queue_s + cost.compute_s + cost.collect_s if measured else None,
        local_s=times[0] if times else None,
        remote_s=times[1] if times else None,
        plan=computing.plan,
    )


def _has_places(demand: Demand, worker: WorkerSnapshot) -> bool:
    most = worker.max_sequences
    return not most or worker.num_sequences + demand.choices <= most


def model_for(
    request_id: str,
    name: str,
    decodes: Sequence[WorkerSnapshot],
    tokenizers: Collection[str],
    detokenizers: Collection[str],
) -> ModelDescription | None:
    """Returns the model that a new request runs on: one that decode workers serve under this name.

    During the rollout of a new version under the same name there are two models; each is picked in
    proportion to its workers. A request keeps its model from its start, because a stream cannot
    continue with another model's tokens. So a new request avoids a model whose last workers leave,
    or that has no tokenizer. tokenizers, detokenizers: the tokenizer digests of serving workers.
    """
    named = [worker for worker in decodes if worker.model.name == name]
    if len({worker.model.digest for worker in named}) > 1:
        serving = [worker for worker in named if worker.load.state is WorkerState.SERVING] or named
        whole = [w for w in serving if has_texts(w.model, tokenizers, detokenizers)] or serving
        return Random(request_id).choice(whole).model
    return named[0].model if named else None


def replacement_model(
    model: ModelDescription, decodes: Iterable[WorkerSnapshot]
) -> ModelDescription:
    """Returns a model that can replace the model of a request without tokens, whose workers have
    left: one of the same name for which the prompt and the parameters have the same meaning.
    Otherwise returns the model itself. Stops at the first worker that still serves it."""
    replacement = model
    for worker in decodes:
        other = worker.model
        if worker.load.state is not WorkerState.SERVING or other.name != model.name:
            continue
        if other.digest == model.digest:
            return model
        same = other.tokenizer_digest == model.tokenizer_digest
        if same and other.vocab_size == model.vocab_size:
            replacement = other if other.max_model_len >= model.max_model_len else replacement
    return replacement


def has_texts(
    model: ModelDescription, tokenizers: Collection[str], detokenizers: Collection[str]
) -> bool:
    """Whether workers can tokenize and detokenize texts of this model."""
    return _among(model, tokenizers) and _among(model, detokenizers)


def models_of(workers: Sequence[WorkerSnapshot]) -> list[ModelDescription]:
    """Returns the models served, one per name, sorted by name; among several of one name, one that
    is not draining."""
    found: dict[str, ModelDescription] = {}
    for worker in workers:
        if worker.model.name not in found or worker.load.state is WorkerState.SERVING:
            found[worker.model.name] = worker.model
    return [found[name] for name in sorted(found)]


def _among(model: ModelDescription, digests: Collection[str]) -> bool:
    wanted = model.tokenizer_digest
    return bool(digests) and (not wanted or wanted in digests or "" in digests)
