"""Which workers of a pool can run an attempt, and which of them best; knows one pool at a time.

Of a large pool only some are looked at: those that hold most of the prompt, and some drawn by the
request's id. Drawing also keeps routers whose reports are equally old from all picking the one
worker that looked best; what a router placed itself counts at once (`WorkerSnapshot.fresh_tokens`).

A worker that stands by is a candidate in two cases only:

    another of its pool is missing      it is one like all others, until that one is back
    no other could run the attempt,     it takes what would fail or wait for nobody
    not even once it is less busy

A pool that is merely busy is not helped out: what stands by is there when somebody dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from baton.core.handover.fit import difference
from baton.core.request.model import WorkerIdentity
from baton.core.routing.load import WorkerState
from baton.core.routing.prefix_index import NO_OVERLAP, Overlap
from baton.core.routing.speed import NOMINAL, WorkerSpeed
from baton.core.routing.worker_cost import Cost, Demand, WorkerSnapshot

MAX_DRAWN = 12
"""The best of so many is among a pool's best tenth almost three times out of four."""

MAX_HOLDERS = 6


class PoolView(NamedTuple):
    """Workers of one role, and what they hold of the prompt. missing: one that does not stand by is
    expected there and takes no work: it is silent, gone, draining, or starting.
    """

    workers: Sequence[WorkerSnapshot]
    overlap: Overlap = NO_OVERLAP
    missing: bool = False


class FilterReason(Enum):
    """What became of a candidate."""

    PICKED = "picked"
    OUTSCORED = "outscored"
    NOT_SERVING = "not serving"
    OTHER_MODEL = "serves another model"
    OTHER_TOKENIZER = "has another tokenizer"
    FAILED_BEFORE = "failed this request a moment ago"
    BUSY = "is full, or refused this request as overloaded a moment ago"
    EJECTED = "its circuit breaker is open"
    QUARANTINED = "another suspect runs there"
    STANDS_BY = "stands by, and no other is missing"
    OTHER_LAYOUT = "its KV does not fit the decode worker"


PASSING = (FilterReason.BUSY, FilterReason.QUARANTINED)
"""What a prefill worker is waited for."""


class Candidate(NamedTuple):
    """Why a worker was or was not picked. cost: None when it was filtered."""

    identity: WorkerIdentity
    filter_reason: FilterReason
    cost: Cost | None = None
    detail: str = ""


class Filtered(NamedTuple):
    """Workers that can run it, and the fates of the others that were looked at."""

    fitting: Sequence[WorkerSnapshot]
    others: Sequence[Candidate]


class Scored(NamedTuple):
    """A worker that could run it, and what that would cost."""

    cost: Cost
    worker: WorkerSnapshot


def filtered(demand: Demand, pool: PoolView, receiver: WorkerSnapshot | None = None) -> Filtered:
    """Looks at some of a pool; at all of it when none of those fits. receiver: who takes the KV,
    if anybody."""
    some = _some(demand, pool)
    found = _sift(demand, some, receiver, pool.missing)
    if len(some) < len(pool.workers) and all(worker.standby for worker in found.fitting):
        return _sift(demand, pool.workers, receiver, pool.missing)
    return found


def ranked(demand: Demand, scored: Iterable[Scored]) -> list[Scored]:
    """Best first. Equal ones are told apart by a hash of request and worker, so that requests
    spread without a counter."""
    ranked = sorted(scored, key=_total)
    best = [entry for entry in ranked if entry.cost.total == ranked[0].cost.total]
    if len(best) > 1:
        best.sort(key=lambda entry: tie_break(demand.request_id, entry.worker.identity))
        ranked[: len(best)] = best
    return ranked


def tie_break(request_id: str, worker: WorkerIdentity) -> bytes:
    """Tells workers apart that are equally good for a request; each request in another order."""
    return blake2b(f"{request_id} {worker.instance_id}".encode(), digest_size=8).digest()


def told(ranked: Sequence[Scored], *, picked: bool = True) -> tuple[Candidate, ...]:
    """The fates of scored workers."""
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
    """The speed of a worker that has not measured its own: of each kind of work a middling one of
    those that have."""
    speeds = [worker.load.speed for worker in workers]
    prefilling = sorted((s for s in speeds if s.prefills), key=lambda s: s.prefill_position_s)
    decoding = sorted((s for s in speeds if s.decodes), key=lambda s: s.step_s)
    found = prefilling[len(prefilling) // 2] if prefilling else NOMINAL
    if decoding:
        found = found.with_decode_of(decoding[len(decoding) // 2])
    return found


def _some(demand: Demand, pool: PoolView) -> Sequence[WorkerSnapshot]:
    workers = pool.workers
    if len(workers) <= MAX_DRAWN + MAX_HOLDERS:
        return workers
    draw = Random(demand.request_id)
    chosen = set(draw.sample(range(len(workers)), MAX_DRAWN))
    holders = pool.overlap.most(MAX_HOLDERS, draw.randrange(len(workers)))
    if holders:
        chosen.update([i for i, worker in enumerate(workers) if worker.number in holders])
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
    """Why the worker cannot be used at all, or None."""
    instance_id = worker.identity.instance_id
    if worker.load.state is not WorkerState.SERVING:
        return FilterReason.NOT_SERVING, worker.load.state.name.lower()
    if not _fits(demand.model, worker.model.name) or not _fits(
        demand.model_digest, worker.model.digest
    ):
        return FilterReason.OTHER_MODEL, worker.model.name
    if not _fits(demand.tokenizer_digest, worker.model.tokenizer_digest):
        return FilterReason.OTHER_TOKENIZER, worker.model.tokenizer_digest
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


def _total(entry: Scored) -> float:
    return entry.cost.total
