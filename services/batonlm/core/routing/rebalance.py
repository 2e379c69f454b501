"""Which running sequences a router moves between decode workers, so that these are evenly loaded,
none runs out of memory for KV, and a request finds room where only their free parts are too small.

A pool is uneven when a worker has more sequences than the mean by a margin, or fewer: many long
answers ended elsewhere, or the worker is new. From then on sequences move from the fullest worker
to the emptiest, one at a time for each pair, until no two workers differ by more than one. A worker
whose memory is nearly full gives its longest sequences to one with room, before it has to preempt.
If the most urgent request that waits fits into no worker's free memory, and would if one sequence
of a worker were elsewhere, that one moves, and nothing has to end or be preempted first.

Every move must help: it never leaves the receiver with more sequences (or a larger part of its
memory in use) than the giver, and where speeds are measured, what it is predicted to save must
exceed the pause that it costs. A sequence that moved rests for a while, one about to end does not
move, and a budget bounds the moves of any minute.

Several routers see the same pool and decide by themselves. Each moves only its own sequences, as
often as its part of the giver's sequences says, at times of its own. Loads that workers report are
slightly old, so its own moves of the last second count in the way that lets fewer follow.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import ceil, floor
from operator import itemgetter
from random import Random

from batonlm.core.request.attempt import SequenceKey
from batonlm.core.routing.load import WorkerSnapshot, WorkerState
from batonlm.core.routing.routing import EXPECTED_OUTPUT, NOISE

INTERVAL_S = 0.5
"""Mean seconds between two plans of a router; each is up to half of it earlier or later."""

MIN_EXCESS = 2.0
"""Least sequences by which a worker must differ from the mean of its pool: less is not worth moves.
"""

PERSISTS_S = 1.0
"""Seconds for which a pool must be uneven before anything moves: as long as two reports take."""

REPORT_S = 1.0
"""Seconds until a worker's reports surely include a move that has ended."""

MIN_LEFT = 32
"""Output tokens that a sequence must be allowed to make yet."""

REST_S = 30.0
"""Seconds before a sequence that moved may move again."""

FAILED_S = 5.0
"""Seconds for which a sequence that did not move, and the worker that did not take it, are left
alone."""

LOW_SHARE = 0.05
"""A worker with a smaller share of free blocks is about to run out of memory."""

ROOMY_SHARE = 0.2
"""The share of free blocks that a receiver has left at least."""

SPARE_SHARE = 2 * LOW_SHARE
"""The same, where the move makes room for a request: less, but not so little that it has to move
something itself."""


class MoveReason(Enum):
    """Why a sequence is to leave its worker."""

    DRAIN = "drain"
    LOAD = "load"
    """The worker has more sequences than others."""
    MEMORY = "memory"
    """The worker's memory for KV is nearly full."""
    ROOM = "room"
    """A request that waits needs its place."""


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """The operator's settings."""

    margin: float = 0.25
    """Share of the mean by which a worker's sequences must differ from it."""
    moves_per_minute: int = 60
    """Most sequences that one router moves in any minute; 0: none."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence of this router that may move."""

    key: SequenceKey
    positions: int
    """Whose KV would move."""
    left: int
    """The most output tokens that it may still make."""
    adapter: str = ""
    """The digest of its LoRA adapter, or ""."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One sequence that is to move."""

    stream: Stream
    giver: str
    """The instance id of the worker on which it runs."""
    receiver: str
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The next attempt of this router's queue, if it waits for memory for KV."""

    model_digest: str
    input_tokens: int
    choices: int
    adapter: str = ""
    """The digest of its LoRA adapter, or ""."""


Streams = Callable[[str], Sequence[Stream]]
"""This router's sequences on a worker, by instance id."""


class Rebalancer:
    """Plans the moves of one router. The caller runs them, and reports how each ended."""

    def __init__(self, policy: RebalancePolicy, router: str, now: float) -> None:
        """router: its instance id. now: a reading of the clock of all calls, in seconds."""
        self._margin = policy.margin
        self._budget = policy.moves_per_minute
        self._begun: deque[float] = deque()
        """When the moves of the last minute began."""
        self._random = Random(router)
        self._due = now
        self._in_flight: dict[PlannedMove, None] = {}
        self._recent: list[tuple[float, PlannedMove]] = []
        """Moves that ended within REPORT_S, with when they did."""
        self._rests: dict[tuple[str, int], float] = {}
        """By request and choice: until when a sequence is left alone."""
        self._failed: dict[str, float] = {}
        """By instance id: until when a worker gets nothing."""
        self._uneven_since: dict[Hashable, float] = {}
        """By kind of worker."""
        self._evening: set[Hashable] = set()
        """Kinds whose sequences move until they are even."""
        self._pressed: set[str] = set()
        """Workers that are about to run out of memory."""

    def is_due(self, now: float) -> bool:
        """Whether it is time for a plan."""
        return self._budget > 0 and now >= self._due

    def plan(
        self,
        workers: Iterable[WorkerSnapshot],
        streams: Streams,
        now: float,
        newcomer: Newcomer | None = None,
    ) -> list[PlannedMove]:
        """Returns what should move now; the caller starts all of it."""
        self._due = now + INTERVAL_S * self._random.uniform(0.5, 1.5)
        while self._begun and self._begun[0] <= now - 60:
            self._begun.popleft()
        self._recent = [(end, move) for end, move in self._recent if end > now - REPORT_S]
        self._rests = {key: end for key, end in self._rests.items() if end > now}
        self._failed = {worker: end for worker, end in self._failed.items() if end > now}
        pools: defaultdict[Hashable, list[WorkerSnapshot]] = defaultdict(list)
        for worker in workers:
            if worker.load.state is WorkerState.SERVING and not worker.standby:
                pools[_kind(worker)].append(worker)
        for gone in self._uneven_since.keys() - pools.keys():
            del self._uneven_since[gone]
        self._evening &= pools.keys()
        here = {worker.identity.instance_id for pool in pools.values() for worker in pool}
        self._pressed &= here
        planned: list[PlannedMove] = []
        streams = cache(streams)
        for kind, pool in pools.items():
            if len(pool) > 1:
                if newcomer is not None and pool[0].model.digest == newcomer.model_digest:
                    planned += self._make_room(newcomer, pool, streams, now)
                planned += self._relieve(pool, streams, now)
                planned += self._even_out(kind, pool, streams, now)
        return planned

    def ended(self, move: PlannedMove, now: float, *, moved: bool, refused: bool = False) -> None:
        """A planned move is over. moved: the sequence runs on the receiver. refused: the receiver
        did not take it."""
        self._in_flight.pop(move, None)
        request_id, choice, _ = move.stream.key
        self._rests[request_id, choice] = now + (REST_S if moved else FAILED_S)
        if moved:
            self._recent.append((now, move))
        if refused:
            self._failed[move.receiver] = now + FAILED_S

    def _even_out(
        self,
        kind: Hashable,
        pool: Sequence[WorkerSnapshot],
        streams: Streams,
        now: float,
    ) -> list[PlannedMove]:
        if not self._is_uneven(kind, pool, now):
            return []
        # What reports include already counts twice here: the giver never has fewer sequences than
        # this, and the receiver never more.
        least = Counter({_id(worker): worker.num_sequences for worker in pool})
        most, total = least.copy(), least.total()
        least.subtract(move.giver for move in self._unreported())
        most.update(move.receiver for move in self._unreported())
        # A sequence that has just moved may count on both workers.
        mean, least_mean = total / len(pool), (total - len(self._recent)) / len(pool)
        # Who has the mean, rounded, gives nothing while others have more, and takes nothing while
        # others have less: so nothing is moved on from where it was moved to.
        enough, fair = ceil(mean), floor(least_mean)
        if max(least.values()) <= enough:
            enough = floor(mean)
        if min(most.values()) >= fair:
            fair = ceil(least_mean)
        planned: list[PlannedMove] = []
        by_load = sorted(pool, key=lambda worker: worker.num_sequences)
        for giver in reversed(by_load):
            for receiver in by_load:
                ahead = least[_id(giver)] - most[_id(receiver)]
                if self._is_spent:
                    break
                if ahead < 2 or least[_id(giver)] <= enough or most[_id(receiver)] >= fair:
                    continue
                if not self._may_move(giver, receiver) or not self._is_turn(giver, ahead // 2):
                    continue
                found = [
                    stream
                    for stream in self._movable(giver, receiver, streams)
                    if _helps(giver, receiver, stream)
                ]
                if found:
                    # What there is to gain for what it costs.
                    stream = min(found, key=lambda s: s.positions / min(s.left, EXPECTED_OUTPUT))
                    planned.append(self._begin(stream, giver, receiver, MoveReason.LOAD, now))
                    least[_id(giver)] -= 1
                    most[_id(receiver)] += 1
        return planned

    def _relieve(
        self, pool: Sequence[WorkerSnapshot], streams: Streams, now: float
    ) -> list[PlannedMove]:
        """Plans moves off workers whose memory is nearly full."""
        planned = []
        for giver in pool:
            if not self._is_pressed(giver):
                continue
            roomy = sorted(pool, key=lambda worker: _used_share(worker))
            for receiver in roomy:
                if self._is_spent or not self._is_pressed(giver):
                    break
                if not self._may_move(giver, receiver) or not self._is_turn(giver, 1):
                    continue
                found = [
                    stream
                    for stream in self._movable(giver, receiver, streams)
                    if _used_share(receiver, _blocks(receiver, stream))
                    <= _used_share(giver, -_blocks(giver, stream))
                ]
                if found:
                    stream = max(found, key=lambda stream: stream.positions)
                    planned.append(self._begin(stream, giver, receiver, MoveReason.MEMORY, now))
        return planned

    def _make_room(
        self, newcomer: Newcomer, pool: Sequence[WorkerSnapshot], streams: Streams, now: float
    ) -> list[PlannedMove]:
        """Plans the move that makes room for it at the cheapest, if it has none and one is enough.
        Until that has ended and is reported, no other."""
        if any(move.reason is MoveReason.ROOM for move in self._unreported()):
            return []
        able = [
            worker for worker in pool if not newcomer.adapter or newcomer.adapter in worker.adapters
        ]
        missing = {
            _id(worker): worker.positions_taken(newcomer.input_tokens, newcomer.choices)
            - worker.free_positions
            for worker in able
        }
        if not missing or min(missing.values()) <= 0 or self._is_spent:
            return []
        found = [
            (stream.positions, stream, giver, receiver)
            for giver in able
            for receiver in pool
            if self._may_move(giver, receiver)
            for stream in self._movable(giver, receiver, streams, SPARE_SHARE)
            if _blocks(giver, stream) * giver.block_size >= missing[_id(giver)]
        ]
        if not found:
            return []
        _, stream, giver, receiver = min(found, key=itemgetter(0))
        return [self._begin(stream, giver, receiver, MoveReason.ROOM, now)]

    def _begin(
        self,
        stream: Stream,
        giver: WorkerSnapshot,
        receiver: WorkerSnapshot,
        reason: MoveReason,
        now: float,
    ) -> PlannedMove:
        self._begun.append(now)
        move = PlannedMove(stream, _id(giver), _id(receiver), reason)
        self._in_flight[move] = None
        return move

    @property
    def _is_spent(self) -> bool:
        return len(self._begun) >= self._budget

    def _unreported(self) -> list[PlannedMove]:
        return [*self._in_flight, *(move for _, move in self._recent)]

    def _is_uneven(self, kind: Hashable, pool: Sequence[WorkerSnapshot], now: float) -> bool:
        """Whether sequences of this kind of workers should move: from when the pool is uneven by
        the margin until it is even."""
        counts = [worker.num_sequences for worker in pool]
        mean, least, most = sum(counts) / len(counts), min(counts), max(counts)
        threshold = max(MIN_EXCESS, self._margin * mean)
        if max(most - mean, mean - least) >= threshold:
            if now >= self._uneven_since.setdefault(kind, now) + PERSISTS_S:
                self._evening.add(kind)
        else:
            self._uneven_since.pop(kind, None)
        if most - least < 2:
            self._evening.discard(kind)
        return kind in self._evening

    def _is_pressed(self, worker: WorkerSnapshot) -> bool:
        """Whether the worker is about to run out of blocks, with moves as if they were over: every
        sequence needs another one soon."""
        if not worker.num_blocks or worker.load.running_sequences < 2:
            return False
        low = max(LOW_SHARE * worker.num_blocks, worker.load.running_sequences)
        leaving = [move for move in self._unreported() if move.giver == _id(worker)]
        free = worker.load.free_blocks + sum(_blocks(worker, move.stream) for move in leaving)
        if free < low:
            self._pressed.add(_id(worker))
        elif free >= 2 * low:
            self._pressed.discard(_id(worker))
        return _id(worker) in self._pressed

    def _may_move(self, giver: WorkerSnapshot, receiver: WorkerSnapshot) -> bool:
        """Whether this pair may have another move, in either direction."""
        pair = {_id(giver), _id(receiver)}
        busy = any({move.giver, move.receiver} == pair for move in self._in_flight)
        return len(pair) == 2 and not busy and _id(receiver) not in self._failed

    def _is_turn(self, giver: WorkerSnapshot, wanted: int) -> bool:
        """Whether this router should move one of `wanted` sequences that are to leave: as often as
        its part of the giver's sequences says, so that all routers together do not move too many.
        """
        part = giver.placed_sequences / max(1, giver.num_sequences)
        # What other routers move is not reported yet at one or two of the next plans.
        return self._random.random() < wanted * part * max(0.25, part * part)

    def _movable(
        self,
        giver: WorkerSnapshot,
        receiver: WorkerSnapshot,
        streams: Streams,
        keep_share: float = ROOMY_SHARE,
    ) -> list[Stream]:
        """This router's sequences there that may move to the receiver. keep_share: of its blocks
        stay free there."""
        coming = [move.stream for move in self._unreported() if move.receiver == _id(receiver)]
        most = receiver.max_sequences
        if most and receiver.num_sequences + len(coming) >= most:
            return []
        block_size = max(1, receiver.block_size)
        free = receiver.free_positions // block_size
        free -= sum(_blocks(receiver, stream) for stream in coming)
        keep = max(keep_share * receiver.num_blocks, 2 * (receiver.num_sequences + 1))
        in_flight = {move.stream.key for move in self._in_flight}
        return [
            stream
            for stream in streams(_id(giver))
            if stream.left >= MIN_LEFT
            and stream.key not in in_flight
            and (stream.key.request_id, stream.key.choice) not in self._rests
            and (not stream.adapter or stream.adapter in receiver.adapters)
            and (not receiver.num_blocks or free - _blocks(receiver, stream) >= keep)
        ]


def _id(worker: WorkerSnapshot) -> str:
    return worker.identity.instance_id


def _kind(worker: WorkerSnapshot) -> Hashable:
    """Workers of one kind compute the same from the same KV, and can hand it to each other."""
    model = worker.model
    kv = worker.layout, worker.transports, worker.exact
    return model.name, model.digest, model.tokenizer_digest, model.max_model_len, *kv


def _blocks(worker: WorkerSnapshot, stream: Stream) -> int:
    """Blocks that a sequence has on a worker."""
    return -(-(stream.positions + worker.state_room) // max(1, worker.block_size))


def _used_share(worker: WorkerSnapshot, more: int = 0) -> float:
    """The share of a worker's blocks in use, with so many more."""
    if not worker.num_blocks:
        return 0.0
    return (worker.num_blocks - worker.load.free_blocks + more) / worker.num_blocks


def _helps(giver: WorkerSnapshot, receiver: WorkerSnapshot, stream: Stream) -> bool:
    """Whether a move is predicted to save all sequences on both workers more than its pause costs
    the one that moves. True where speeds are not measured."""
    here, there = giver.load.speed, receiver.load.speed
    if not (here.decodes and there.decodes):
        return True
    rows, context = giver.num_sequences, giver.used_positions
    before_s = here.decode_s(rows, context)
    if abs(there.decode_s(rows, context) - before_s) <= NOISE * before_s:
        there = there.with_decode_of(here)
    after_s = here.decode_s(rows - 1, max(0, context - stream.positions))
    other_rows, other_context = receiver.num_sequences, receiver.used_positions
    there_before_s = there.decode_s(other_rows, other_context)
    there_after_s = there.decode_s(other_rows + 1, other_context + stream.positions)
    saved_s = (
        before_s
        - there_after_s
        + (rows - 1) * (before_s - after_s)
        - other_rows * (there_after_s - there_before_s)
    )
    pause_s = there.handover_tail_s(stream.positions * receiver.kv_bytes_per_position)
    return saved_s * min(stream.left, EXPECTED_OUTPUT) > pause_s
