"""What an attempt would cost on a worker, in predicted seconds; picks nothing, knows no clock.

Everybody's seconds count the same: those that the attempt itself waits and those by which it holds
up sequences that run already. Tokens that a worker has cached cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.kvcache.prefix import UNIT_TOKENS
from baton.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from baton.core.routing.load import WorkerLoad
from baton.core.routing.prefix_index import Overlap
from baton.core.routing.speed import NOMINAL, WorkerSpeed

SEQUENCE_S = 0.0016
"""What a sequence on a worker counts besides what it was measured to cost: sequences spread also
over workers for which one more costs next to nothing."""

SHORTAGE_COST = 8
"""A position without a free block counts as prefilling so many: room comes before queues."""

EXPECTED_OUTPUT = 128
"""Output tokens that a request counts for when it does not say that it wants fewer."""

NOISE = 0.2
"""Steps that take a share more or less than a middling worker's count as its: over a whole output,
differences that are chance would outweigh what a worker has cached."""

NEW_SHARE = 0.1
"""Of a worker that was met just now. A worker's share grows to 1 while it is new; what is on it
counts as so many times more, so it gets about that share of what others have. What it is asked to
take does not: while others are idle, too, a new worker is as good as they are. And where nobody is
older there is nobody who could have more."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at one moment. number: in the prefix index, below 0 without a place there. since:
    when it was met, on the clock of `decide`'s now. max_sequences and standby are as in
    WorkerDescription.

    placed_*: what this router has given it and that is not done yet: a report is always a little
    old. fresh_*: that part of it that was given after the newest report came; positions are what
    needs blocks, tokens what is to be prefilled.
    """

    identity: WorkerIdentity
    model: ModelDescription
    load: WorkerLoad
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    block_size: int = 1
    num_blocks: int = 0
    kv_bytes_per_position: int = 0
    max_sequences: int = 0
    standby: bool = False
    number: int = -1
    since: float = 0.0
    placed_sequences: int = 0
    placed_tokens: int = 0
    fresh_sequences: int = 0
    fresh_tokens: int = 0
    fresh_positions: int = 0

    @property
    def num_sequences(self) -> int:
        load = self.load
        known = load.waiting_sequences + load.running_sequences + self.fresh_sequences
        return max(known, self.placed_sequences)

    @property
    def waiting_tokens(self) -> int:
        return max(self.load.waiting_tokens + self.fresh_tokens, self.placed_tokens)

    @property
    def free_positions(self) -> int:
        return max(0, self.load.free_blocks * self.block_size - self.fresh_positions)

    @property
    def used_positions(self) -> int:
        return max(0, self.num_blocks - self.load.free_blocks) * self.block_size


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. Empty strings match anything.

    input_tokens: prompt and accepted output. prefix_hashes: of the prompt's units. output_tokens:
    at most so many will be made. failed: instance ids that lost an attempt of this request a moment
    ago; busy: those that refused one as overloaded; ejected: those whose circuit breaker is open;
    quarantined: those that a suspect, which this attempt is, must not join.
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
    prefix_hashes: bytes = b""
    output_tokens: int = EXPECTED_OUTPUT


class Cost(NamedTuple):
    """Why a worker costs what it does; all but the tokens in seconds. total: what is compared.

    queue_s, compute_s: until the first token, by what is before the attempt and by its own uncached
    tokens. crowd_s: the steps its output takes with the others there. harm_s: added to others, to
    sequences that run or to hand-overs that want the same link.
    shortage_s: for blocks that are not free. share: below 1 for a worker that is new.
    """

    total: float
    queue_s: float
    compute_s: float
    crowd_s: float
    harm_s: float
    shortage_s: float
    share: float
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class Moment:
    """What holds for all workers while one decision is made. slow_start_s: for how long a worker
    counts as new. default_speed: a middling speed, and that of a worker that has not measured its
    own. first_met: when the oldest worker was met."""

    overlap: Overlap
    now: float
    slow_start_s: float
    default_speed: WorkerSpeed
    first_met: float = 0.0


def uncached_tokens(demand: Demand, worker: WorkerSnapshot, overlap: Overlap) -> int:
    """Input tokens that the worker would compute; the last one always."""
    return max(1, demand.input_tokens - UNIT_TOKENS * overlap.units(worker.number))


def prefill_cost(demand: Demand, worker: WorkerSnapshot, moment: Moment) -> Cost:
    """For computing the input there and handing its KV over."""
    known = worker.load.speed
    speed = known if known.prefills else moment.default_speed
    uncached = uncached_tokens(demand, worker, moment.overlap)
    share, sequences = _share(worker, moment), worker.num_sequences
    queue_s = speed.queue_s(worker.waiting_tokens, sequences)
    compute_s = speed.prefill_s(demand.input_tokens - uncached, demand.input_tokens)
    crowd_s = SEQUENCE_S * (sequences / share + demand.choices)
    shortage_s = _shortage_s(demand, worker, speed)
    total = queue_s / share + compute_s + crowd_s + shortage_s
    return Cost(total, queue_s, compute_s, crowd_s, 0.0, shortage_s, share, uncached)


def decode_costs(demand: Demand, worker: WorkerSnapshot, moment: Moment) -> tuple[Cost, Cost]:
    """For decoding there with the input computed there, too, and with KV that comes."""
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
    added_s = speed.prefill_s(demand.input_tokens - uncached, demand.input_tokens)
    # Chunks share their steps with what runs; alone they are larger.
    step_s = speed.decode_s(sequences, used)
    queue_s += speed.prefill_steps(waiting) * step_s
    compute_s = added_s + (speed.prefill_steps(uncached) if sequences else 1) * step_s
    harm_s = added_s * worker.load.running_sequences
    total = queue_s / share + compute_s + harm_s + crowd_s + shortage_s
    local = Cost(total, queue_s, compute_s, crowd_s, harm_s, shortage_s, share, uncached)
    return local, collecting


def handover_tail_s(
    demand: Demand, prefill: WorkerSnapshot, receiver: WorkerSnapshot, uncached: int
) -> float:
    """How long after token 0 the KV that prefill computed is with the receiver."""
    speed = prefill.load.speed
    chunk = min(uncached, speed.prefill_step_tokens or uncached)
    num_bytes = chunk * receiver.kv_bytes_per_position
    return receiver.load.speed.handover_tail_s(num_bytes)


def shortage(demand: Demand, worker: WorkerSnapshot) -> int:
    """Positions that would have no free block."""
    return max(0, demand.input_tokens + demand.choices - worker.free_positions)


def _shortage_s(demand: Demand, worker: WorkerSnapshot, speed: WorkerSpeed) -> float:
    return SHORTAGE_COST * shortage(demand, worker) * speed.prefill_position_s


def _link_s(worker: WorkerSnapshot, uncached: int, moment: Moment) -> float:
    """How long KV that the worker lacks takes up its link. The attempt itself hardly waits: most of
    it comes while the prompt is computed."""
    speeds = (worker.load.speed, moment.default_speed, NOMINAL)
    rate = next(speed.link_bytes_per_s for speed in speeds if speed.link_bytes_per_s)
    return uncached * worker.kv_bytes_per_position / rate


def _plain(own_s: float, middling_s: float) -> float:
    return middling_s if abs(own_s - middling_s) <= NOISE * middling_s else own_s


def _share(worker: WorkerSnapshot, moment: Moment) -> float:
    if moment.slow_start_s <= 0.0:
        return 1.0
    return _grown(worker.since, moment) / _grown(moment.first_met, moment)


def _grown(since: float, moment: Moment) -> float:
    return min(1.0, max(NEW_SHARE, (moment.now - since) / moment.slow_start_s))
