"""Which workers run an attempt: filter, score, pick, as pure functions over worker snapshots.

Conditional disaggregation: a prompt gets a prefill worker of its own when that takes all who are
concerned less time, by the speeds that the workers have measured themselves; while they have not, a
long enough prompt gets one. A prefill worker that is merely busy is waited for: its load must not
spill over into decode's steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.request.model import WorkerIdentity
from baton.core.routing.candidates import PASSING, Scored, default_speed, filtered, ranked, told
from baton.core.routing.candidates import Candidate as Candidate
from baton.core.routing.candidates import FilterReason as FilterReason
from baton.core.routing.candidates import PoolView as PoolView
from baton.core.routing.load import WorkerState
from baton.core.routing.prefix_index import NO_OVERLAP
from baton.core.routing.worker_cost import Demand as Demand
from baton.core.routing.worker_cost import (
    Moment,
    decode_costs,
    handover_tail_s,
    prefill_cost,
    shortage,
)
from baton.core.routing.worker_cost import WorkerSnapshot as WorkerSnapshot

SHORT_INPUT = 32
"""What counts as short enough to prefill on decode while speeds are unknown: uncached tokens."""

ALONE = "every choice ends at token 0"
SHORT = "short enough to prefill on decode"
NO_PREFILL = "no prefill worker fits: prefill on decode"
CHEAPER = "prefilling on decode takes less time"
APART = "prefill and decode apart"
"""Reasons of decisions that say where an attempt runs."""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """local_prefill_tokens: inputs with at most so many uncached tokens are prefilled on decode;
    below 0: those for which it takes less time. slow_start_s: for how long a worker counts as new.
    """

    local_prefill_tokens: int = -1
    slow_start_s: float = 0.0

    @property
    def by_speed(self) -> bool:
        return self.local_prefill_tokens < 0

    @property
    def short(self) -> int:
        """Inputs with at most so many uncached tokens never wait for a prefill worker."""
        return SHORT_INPUT if self.by_speed else self.local_prefill_tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """Where an attempt runs, and why. At least one of the two is set, or `wait` says to try later.

    reason: one sentence on the shape of the decision. uncached_tokens: what whoever prefills will
    compute. first_token_s: predicted, None when that worker has not measured its speed. local_s,
    remote_s: what was compared, if it was.
    """

    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    reason: str
    candidates: tuple[Candidate, ...]
    uncached_tokens: int = 0
    first_token_s: float | None = None
    local_s: float | None = None
    remote_s: float | None = None

    @property
    def wait(self) -> bool:
        return self.prefill is None and self.decode is None

    def lines(self) -> list[str]:
        """The whole choice in words."""
        said = [self.reason]
        if self.local_s is not None and self.remote_s is not None:
            said[0] += f": {self.local_s:.4f} s on decode, {self.remote_s:.4f} s apart"
        for identity, filter_reason, cost, detail in self.candidates:
            words = [f"{identity.role} {identity.instance_id[:8]}: {filter_reason.value}", detail]
            if cost is not None:
                words += [f"{name} {value:.4g}" for name, value in cost._asdict().items()]
            said.append(" ".join(filter(None, words)))
        return said


def decide(
    demand: Demand, prefills: PoolView, decodes: PoolView, policy: RoutingPolicy, now: float = 0.0
) -> Decision:
    """Filter, score, pick. now: on the clock by which workers were met."""
    if not demand.needs_decode:
        alone = _prefill(demand, prefills, policy, now)
        if alone.best is not None:
            return _on_prefill(alone, None, ALONE)
    found = filtered(demand, decodes)
    moment = _moment(decodes, found.fitting, policy, now)
    costs = [(decode_costs(demand, worker, moment), worker) for worker in found.fitting]
    local = ranked(demand, [Scored(cost[0], worker) for cost, worker in costs])
    here = _Choice(local, found.others)
    if here.best is None:
        return Decision(None, None, "no decode worker can take it", here.told())
    short = here.best.cost.uncached_tokens <= policy.short
    if short and not policy.by_speed:
        return _on_decode(here, None, SHORT)
    collecting = ranked(demand, [Scored(cost[1], worker) for cost, worker in costs])
    there = _Choice(collecting, found.others)
    assert there.best is not None
    apart = _prefill(demand, prefills, policy, now, there.best.worker)
    if apart.best is None:
        if not short and any(candidate.filter_reason in PASSING for candidate in apart.others):
            seen = (*here.told(picked=False), *apart.told())
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
    """Where sequences that run on a worker can go on with their KV. None: nowhere is room for all
    of them now; they are better off where they are."""
    if sender.layout is None:
        return None
    roomy = [w for w in decodes if not shortage(demand, w) and _has_places(demand, w)]
    leaving = sender.load.state is not WorkerState.SERVING
    fitting = filtered(demand, PoolView(roomy, missing=leaving), sender).fitting
    moment = Moment(NO_OVERLAP, 0.0, 0.0, default_speed(fitting))
    found = ranked(demand, [Scored(decode_costs(demand, w, moment)[1], w) for w in fitting])
    return found[0].worker.identity if found else None


def is_stalled(step_age_us: int, step_predicted_us: int) -> bool:
    """Whether a worker's running step is so old that the worker counts as dead."""
    return step_age_us > max(2_000_000, 3 * step_predicted_us)


class _Choice(NamedTuple):
    """One pool's part: workers that can do it, best first, and the fates of others."""

    scored: Sequence[Scored]
    others: Sequence[Candidate]

    @property
    def best(self) -> Scored | None:
        return self.scored[0] if self.scored else None

    def told(self, *, picked: bool = True) -> tuple[Candidate, ...]:
        return (*told(self.scored, picked=picked), *self.others)


def _prefill(
    demand: Demand,
    pool: PoolView,
    policy: RoutingPolicy,
    now: float,
    receiver: WorkerSnapshot | None = None,
) -> _Choice:
    found = filtered(demand, pool, receiver)
    moment = _moment(pool, found.fitting, policy, now)
    costs = [Scored(prefill_cost(demand, worker, moment), worker) for worker in found.fitting]
    return _Choice(ranked(demand, costs), found.others)


def _moment(
    pool: PoolView, fitting: Sequence[WorkerSnapshot], policy: RoutingPolicy, now: float
) -> Moment:
    first_met = min((worker.since for worker in fitting), default=now)
    return Moment(pool.overlap, now, policy.slow_start_s, default_speed(fitting), first_met)


def _compared(
    demand: Demand, here: Scored, there: Scored, apart: Scored
) -> tuple[float, float] | None:
    """Seconds on decode alone, and with prefill and decode apart; None when somebody's speed is
    not known."""
    decode, receiver, prefill = (entry.worker.load.speed for entry in (here, there, apart))
    if not (decode.prefills and prefill.prefills and receiver.handover_s):
        return None
    tail_s = handover_tail_s(demand, apart.worker, there.worker, apart.cost.uncached_tokens)
    # KV on the link holds up nobody who computes; the tail is what is waited for.
    collecting_s = there.cost.total - there.cost.harm_s
    return here.cost.total, apart.cost.total + tail_s + collecting_s


def _on_decode(
    here: _Choice, apart: _Choice | None, reason: str, times: tuple[float, float] | None = None
) -> Decision:
    """Prefill and decode on one worker. apart: what was looked at for prefill."""
    seen = here.told() if apart is None else (*here.told(), *apart.told(picked=False))
    return _decision(None, here.best, here.best, reason, seen, times)


def _on_prefill(
    apart: _Choice, there: _Choice | None, reason: str, times: tuple[float, float] | None = None
) -> Decision:
    """there: who decodes what prefill hands over."""
    decode = None if there is None else there.best
    seen = apart.told() if there is None else (*there.told(), *apart.told())
    return _decision(apart.best, decode, apart.best, reason, seen, times)


def _decision(
    prefill: Scored | None,
    decode: Scored | None,
    computing: Scored | None,
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
        first_token_s=cost.queue_s + cost.compute_s if measured else None,
        local_s=times[0] if times else None,
        remote_s=times[1] if times else None,
    )


def _has_places(demand: Demand, worker: WorkerSnapshot) -> bool:
    most = worker.max_sequences
    return not most or worker.num_sequences + demand.choices <= most
