"""Which workers run an attempt: filter, score, pick, as pure functions over worker snapshots.

Conditional disaggregation: a prompt gets a prefill worker of its own only when its input is long
enough and one is there whose KV fits the decode worker's; else decode prefills by itself. A
prefill worker that is merely busy is waited for: its load must not spill over into decode's steps.
Knows nothing of requests beyond the numbers in `Demand`; every candidate's fate is in the Decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from baton.core.fit import difference
from baton.core.load import WorkerLoad, WorkerState
from baton.core.model import KvLayout, ModelDescription, WorkerIdentity

SEQUENCE_COST = 16
"""What a waiting or running sequence counts, in queued tokens."""

SHORTAGE_COST = 8
"""What one position without a free block counts, in queued tokens: room comes before queues."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at one moment. placed_*: what this router has given it and that is not done yet,
    since a report is always a little old. max_sequences: as WorkerDescription has it.
    """

    identity: WorkerIdentity
    model: ModelDescription
    load: WorkerLoad
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    block_size: int = 1
    max_sequences: int = 0
    placed_sequences: int = 0
    placed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. Empty strings match anything.

    input_tokens: prompt and accepted output. failed: incarnations that lost an attempt of this
    request a moment ago; busy: those that refused one as overloaded; ejected: those whose circuit
    breaker is open; quarantined: those that a suspect, which this attempt is, must not join.
    """

    request_id: str
    input_tokens: int
    choices: int
    needs_decode: bool
    model: str = ""
    model_digest: str = ""
    tokenizer_digest: str = ""
    failed: frozenset[str] = frozenset()
    busy: frozenset[str] = frozenset()
    ejected: frozenset[str] = frozenset()
    quarantined: frozenset[str] = frozenset()


class Fate(Enum):
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
    OTHER_LAYOUT = "its KV does not fit the decode worker"


_PASSING = (Fate.BUSY, Fate.QUARANTINED)
"""What a prefill worker is waited for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Why a worker was or was not picked. cost: in queued tokens; None when it was filtered."""

    identity: WorkerIdentity
    fate: Fate
    cost: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where an attempt runs, and why. At least one of the two is set, or `wait` says to try later.

    reason: one sentence on the shape of the decision.
    """

    prefill: WorkerIdentity | None
    decode: WorkerIdentity | None
    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def wait(self) -> bool:
        return self.prefill is None and self.decode is None


def decide(
    demand: Demand,
    prefills: Iterable[WorkerSnapshot],
    decodes: Iterable[WorkerSnapshot],
    *,
    local_prefill_tokens: int,
) -> Decision:
    """Filter, score, pick. Inputs of at most local_prefill_tokens are prefilled on decode."""
    if not demand.needs_decode:
        prefill, seen = _pick(demand, prefills, None)
        if prefill is not None:
            return Decision(prefill.identity, None, "every choice ends at token 0", seen)
    decode, seen = _pick(demand, decodes, None)
    if decode is None:
        return Decision(None, None, "no decode worker can take it", seen)
    if demand.input_tokens <= local_prefill_tokens:
        return Decision(None, decode.identity, "short enough to prefill on decode", seen)
    prefill, seen_too = _pick(demand, prefills, decode)
    seen += seen_too
    if prefill is not None:
        return Decision(prefill.identity, decode.identity, "prefill and decode apart", seen)
    if any(candidate.fate in _PASSING for candidate in seen_too):
        return Decision(None, None, "every prefill worker that fits is busy", seen)
    return Decision(None, decode.identity, "no prefill worker fits: prefill on decode", seen)


def collector_for(
    demand: Demand, decodes: Iterable[WorkerSnapshot], giver: WorkerSnapshot
) -> WorkerIdentity | None:
    """Where sequences that run on a worker can go on with their KV. None: nowhere is room for all
    of them now; they are better off where they are."""
    if giver.layout is None:
        return None
    roomy = [w for w in decodes if not _shortage(demand, w) and _has_places(demand, w)]
    picked, _ = _pick(demand, roomy, giver)
    return None if picked is None else picked.identity


def _pick(
    demand: Demand, workers: Iterable[WorkerSnapshot], collector: WorkerSnapshot | None
) -> tuple[WorkerSnapshot | None, tuple[Candidate, ...]]:
    costs: list[tuple[float, bytes, WorkerSnapshot]] = []
    filtered: list[Candidate] = []
    for worker in workers:
        fate, detail = _filter(demand, worker, collector)
        if fate is None:
            costs.append((cost(demand, worker), _tie_break(demand, worker), worker))
        else:
            filtered.append(Candidate(worker.identity, fate, detail=detail))
    costs.sort(key=lambda entry: entry[:2])
    scored = [
        Candidate(worker.identity, Fate.OUTSCORED if rank else Fate.PICKED, worker_cost)
        for rank, (worker_cost, _, worker) in enumerate(costs)
    ]
    return (costs[0][2] if costs else None), (*scored, *filtered)


def _filter(
    demand: Demand, worker: WorkerSnapshot, collector: WorkerSnapshot | None
) -> tuple[Fate | None, str]:
    """Why the worker cannot be used at all, or None. collector: who takes its KV, if anybody."""
    incarnation = worker.identity.incarnation
    if worker.load.state is not WorkerState.SERVING:
        return Fate.NOT_SERVING, worker.load.state.name.lower()
    if not _fits(demand.model, worker.model.name) or not _fits(
        demand.model_digest, worker.model.digest
    ):
        return Fate.OTHER_MODEL, worker.model.name
    if not _fits(demand.tokenizer_digest, worker.model.tokenizer_digest):
        return Fate.OTHER_TOKENIZER, worker.model.tokenizer_digest
    if collector is not None and collector.layout is not None:
        misfit = difference(
            worker.layout, worker.transports, collector.layout, collector.transports
        )
        if misfit:
            return Fate.OTHER_LAYOUT, misfit
    if incarnation in demand.failed:
        return Fate.FAILED_BEFORE, ""
    if incarnation in demand.busy:
        return Fate.BUSY, ""
    if incarnation in demand.ejected:
        return Fate.EJECTED, ""
    if incarnation in demand.quarantined:
        return Fate.QUARANTINED, ""
    return None, ""


def _fits(wanted: str, offered: str) -> bool:
    return not wanted or not offered or wanted == offered


def cost(demand: Demand, worker: WorkerSnapshot) -> float:
    """How long the attempt would wait and how crowded it would be, in queued tokens; less wins."""
    queued = max(worker.load.waiting_tokens, worker.placed_tokens)
    crowd, shortage = _num_sequences(worker), _shortage(demand, worker)
    return queued + SEQUENCE_COST * crowd + SHORTAGE_COST * shortage


def _num_sequences(worker: WorkerSnapshot) -> int:
    load = worker.load
    return max(load.waiting_sequences + load.running_sequences, worker.placed_sequences)


def _shortage(demand: Demand, worker: WorkerSnapshot) -> int:
    """Positions that would have no free block."""
    free = worker.load.free_blocks * worker.block_size
    return max(0, demand.input_tokens + demand.choices - free)


def _has_places(demand: Demand, worker: WorkerSnapshot) -> bool:
    most = worker.max_sequences
    return not most or _num_sequences(worker) + demand.choices <= most


def _tie_break(demand: Demand, worker: WorkerSnapshot) -> bytes:
    """Equal workers are told apart by a hash of both, so that requests spread without a counter."""
    return blake2b(
        f"{demand.request_id} {worker.identity.incarnation}".encode(), digest_size=8
    ).digest()


def is_stalled(step_age_us: int, step_predicted_us: int) -> bool:
    """Whether a worker's running step is so old that the worker counts as dead."""
    return step_age_us > max(2_000_000, 3 * step_predicted_us)


def models_of(workers: Sequence[WorkerSnapshot]) -> list[ModelDescription]:
    """The models served, each name once, in order of name."""
    return [
        model
        for _, model in sorted({worker.model.name: worker.model for worker in workers}.items())
    ]
