"""Rebalancer: loads only get more even, moves stay within their budget, and they come to an end."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.request.attempt import SequenceKey
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerSpeed, WorkerState
from batonlm.core.routing.rebalance import (
    FAILED_S,
    MIN_EXCESS,
    MIN_LEFT,
    REPORT_S,
    REST_S,
    MoveReason,
    Newcomer,
    PlannedMove,
    RebalancePolicy,
    Rebalancer,
    Stream,
)
from tests.depth import examples

MODEL = ModelDescription("m", "digest", 4096, 512, (3,))
LAYOUT = KvLayout("digest", "float32", 2, 2, 8, 8)
BLOCK = 16
TICK_S = 0.5


@dataclass
class Pool:
    """Decode workers as they really are, and as they reported a while ago."""

    routers: int = 1
    policy: RebalancePolicy = field(default_factory=RebalancePolicy)
    blocks: int = 10_000
    delay_s: float = 0.0
    """How old reports are."""
    takes_s: float = 0.1
    """How long a move takes."""
    now: float = 100.0
    streams: dict[str, list[tuple[int, Stream]]] = field(default_factory=dict)
    """By worker; each with its router."""
    moves: list[tuple[float, PlannedMove]] = field(default_factory=list)
    workers: dict[str, WorkerSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rebalancers = [
            Rebalancer(self.policy, f"router {n}", self.now) for n in range(self.routers)
        ]
        self._under_way: list[tuple[float, int, PlannedMove]] = []
        self._reports: deque[tuple[float, dict[str, WorkerLoad]]] = deque()
        self._made = 0

    def add(self, worker: str, *sequences: tuple[int, int], **changes: Any) -> None:
        """Adds a worker, or sequences of (positions, left) to it."""
        here = self.streams.setdefault(worker, [])
        for positions, left in sequences:
            self._made += 1
            of = self._made % self.routers
            here.append((of, Stream(SequenceKey(f"r{self._made}", 0, 0), positions, left)))
        if worker not in self.workers:
            snapshot = WorkerSnapshot(
                WorkerIdentity("decode", worker, ""),
                model=MODEL,
                layout=LAYOUT,
                num_blocks=self.blocks,
                block_size=BLOCK,
                kv_bytes_per_position=1000,
                load=WorkerLoad(WorkerState.SERVING),
            )
            self.workers[worker] = replace(snapshot, **changes)

    @property
    def counts(self) -> dict[str, int]:
        return {worker: len(here) for worker, here in self.streams.items()}

    @property
    def spread(self) -> int:
        return max(self.counts.values()) - min(self.counts.values())

    def used(self, worker: str) -> int:
        return sum(-(-stream.positions // BLOCK) for _, stream in self.streams[worker])

    def own(self, worker: str) -> list[Stream]:
        """Of the only router."""
        return [stream for _, stream in self.streams[worker]]

    def _load(self, worker: str) -> WorkerLoad:
        made = self.workers[worker]
        return replace(
            made.load,
            running_sequences=len(self.streams[worker]),
            free_blocks=made.num_blocks - self.used(worker),
        )

    def seen(self, router: int) -> list[WorkerSnapshot]:
        while len(self._reports) > 1 and self._reports[1][0] <= self.now - self.delay_s:
            self._reports.popleft()
        reported = self._reports[0][1]
        return [
            replace(
                snapshot,
                load=reported.get(worker) or self._load(worker),
                placed_sequences=sum(of == router for of, _ in self.streams[worker]),
            )
            for worker, snapshot in self.workers.items()
        ]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick()

    def tick(self) -> None:
        """Time passes; moves end, and routers that are due plan."""
        self.now += TICK_S
        for item in [item for item in self._under_way if item[0] <= self.now]:
            self._under_way.remove(item)
            _, router, move = item
            found = (router, move.stream)
            self.streams[move.giver].remove(found)
            self.streams[move.receiver].append(found)
            self.rebalancers[router].ended(move, self.now, moved=True)
        self._reports.append((self.now, {worker: self._load(worker) for worker in self.workers}))
        for router, rebalancer in enumerate(self.rebalancers):
            if not rebalancer.is_due(self.now):
                continue

            def own(worker: str, router: int = router) -> list[Stream]:
                return [stream for of, stream in self.streams[worker] if of == router]

            for move in rebalancer.plan(self.seen(router), own, self.now):
                self.moves.append((self.now, move))
                self._under_way.append((self.now + self.takes_s, router, move))


def pool_of(*counts: int, left: int = 500, **options: Any) -> Pool:
    """Workers with so many sequences."""
    pool = Pool(**options)
    for number, count in enumerate(counts):
        pool.add(f"w{number}", *[(100 + n, left) for n in range(count)])
    return pool


def test_one_worker_has_nobody_to_give_to() -> None:
    pool = pool_of(50)
    pool.run(60)
    assert not pool.moves


def test_a_new_worker_gets_its_part() -> None:
    pool = pool_of(10, 10)
    pool.run(30)
    assert not pool.moves, "an even pool stays as it is"
    pool.add("new")
    pool.run(60)
    assert sorted(pool.counts.values()) == [6, 7, 7]
    assert len(pool.moves) == 6
    assert {move.reason for _, move in pool.moves} == {MoveReason.LOAD}


def test_small_and_short_differences_move_nothing() -> None:
    pool = pool_of(11, 10, 9)
    pool.run(60)
    pool = pool_of(3, 0)
    pool.run(60)
    assert not pool.moves
    burst = pool_of(8, 8)
    for _ in range(20):
        burst.add("w0", *[(10, 500)] * 10)
        burst.run(TICK_S)
        del burst.streams["w0"][8:]
        burst.run(2 * TICK_S)
    assert not burst.moves


def test_what_is_about_to_end_stays() -> None:
    pool = pool_of(20, 0, left=MIN_LEFT - 1)
    pool.run(60)
    assert not pool.moves


def test_nothing_moves_without_a_budget() -> None:
    pool = pool_of(20, 0, policy=RebalancePolicy(moves_per_minute=0))
    assert not pool.rebalancers[0].is_due(pool.now + 1000)
    assert pool.rebalancers[0].plan(pool.workers.values(), lambda _: [], 1000.0) == []
    pool.run(60)
    assert not pool.moves


@pytest.mark.parametrize(
    "changes",
    [
        {"model": replace(MODEL, digest="another")},
        {"layout": replace(LAYOUT, num_layers=3)},
        {"layout": None},
        {"exact": True},
        {"standby": True},
        {"load": WorkerLoad(WorkerState.DRAINING)},
        {"load": WorkerLoad(WorkerState.STARTING)},
        {"max_sequences": 2},
        {"num_blocks": 12},
    ],
)
def test_workers_that_get_nothing(changes: dict[str, Any]) -> None:
    pool = pool_of(20)
    pool.add("other", (16, 500), (16, 500), **changes)
    pool.run(60)
    assert not pool.moves


def test_an_adapter_has_to_be_there() -> None:
    pool = pool_of(0, 0)
    pool.streams["w0"] = [
        (0, Stream(SequenceKey(f"a{n}", 0, 0), 50, 500, "digest")) for n in range(8)
    ]
    pool.run(10)
    assert not pool.moves
    pool.workers["w1"] = replace(pool.workers["w1"], adapters=frozenset({"digest"}))
    pool.run(60)
    assert pool.counts == {"w0": 4, "w1": 4}


def test_one_that_did_not_move_and_its_receiver_are_left_alone() -> None:
    now = 0.0
    rebalancer = Rebalancer(RebalancePolicy(), "router", now)
    pool = pool_of(4, 0)
    pool.tick()

    def plans() -> list[PlannedMove]:
        return rebalancer.plan(pool.seen(0), pool.own, now)

    assert plans() == []
    now = 2.0
    (first,) = plans()
    assert plans() == [], "one at a time for a pair"
    rebalancer.ended(first, now, moved=False, refused=True)
    now += FAILED_S - 0.1
    assert plans() == []
    now += 0.2
    (again,) = plans()
    assert again.stream == first.stream, "the cheapest"
    rebalancer.ended(again, now, moved=False)
    (other,) = plans()
    assert other.stream != first.stream


def test_a_move_must_save_more_than_its_pause() -> None:
    def moved(speed: WorkerSpeed, other: WorkerSpeed | None = None) -> int:
        pool = pool_of(24, 0)
        for worker, known in zip(("w0", "w1"), (speed, other or speed), strict=True):
            load = WorkerLoad(WorkerState.SERVING, speed=known)
            pool.workers[worker] = replace(pool.workers[worker], load=load)
        pool.run(60)
        return len(pool.moves)

    assert moved(WorkerSpeed(step_s=0.01, row_s=0.001, handover_s=0.05)) == 12
    # Steps take as long with any number of sequences.
    assert moved(WorkerSpeed(step_s=0.01, handover_s=0.05)) == 0
    assert moved(WorkerSpeed(step_s=0.01, row_s=1e-5, handover_s=30.0)) == 0
    slow = WorkerSpeed(step_s=0.2, row_s=0.02, handover_s=0.05)
    assert moved(WorkerSpeed(step_s=0.01, row_s=0.001), slow) == 0
    alike = WorkerSpeed(step_s=0.011, row_s=0.0011, handover_s=0.05)
    assert moved(WorkerSpeed(step_s=0.01, row_s=0.001, handover_s=0.05), alike) == 12


def test_a_worker_that_runs_out_of_memory_gives_its_longest() -> None:
    pool = Pool(blocks=1000)
    pool.add("full", *[(3000, 500), (3200, 500), (3400, 500), (3600, 500), (2000, 500)])
    pool.add("roomy", *[(100, 500)] * 5)
    before = pool.used("full")
    assert before > 950
    pool.run(60)
    assert pool.moves[0][1].stream.positions == 3600
    assert {move.reason for _, move in pool.moves} == {MoveReason.MEMORY}
    assert pool.used("full") <= 900 and pool.used("roomy") < 800
    assert len(pool.moves) == 1


def test_memory_goes_nowhere_where_there_is_none() -> None:
    pool = Pool(blocks=1000)
    pool.add("full", *[(3000, 500), (3200, 500), (3400, 500), (3600, 500), (2000, 500)])
    pool.add("nearly", *[(2500, 500)] * 5)
    pool.run(60)
    assert not pool.moves


def test_one_moves_for_a_request_that_fits_nowhere() -> None:
    pool = Pool(blocks=1000)
    for worker, freed in (("w0", 3000), ("w1", 2400)):
        pool.add(worker, (3000, 500), (freed, 500), (4000, 500))
    pool.tick()
    # 375 and 413 blocks are free.
    assert [1000 - pool.used(worker) for worker in ("w0", "w1")] == [374, 412]

    def moved(tokens: int, choices: int = 1, **changes: Any) -> list[tuple[str, int]]:
        rebalancer = Rebalancer(RebalancePolicy(), "router", 0.0)
        newcomer = replace(Newcomer("digest", tokens, choices), **changes)

        def plan() -> list[PlannedMove]:
            return rebalancer.plan(pool.seen(0), pool.own, 1.0, newcomer)

        planned = plan()
        assert not plan(), "one at a time"
        for move in planned:
            assert move.reason is MoveReason.ROOM
            rebalancer.ended(move, 1.0, moved=True)
            assert not plan(), "until reports include it"
        return [(move.giver, move.stream.positions) for move in planned]

    assert moved(6000) == [], "w1 has room"
    assert moved(7000) == [("w1", 2400)], "the least that is enough"
    assert moved(9000) == [("w1", 3000)]
    assert moved(12_000) == [], "no one is enough"
    assert moved(6500, choices=200) == [("w1", 2400)]
    assert moved(7000, model_digest="another") == []
    assert moved(7000, adapter="absent") == []


def test_making_room_leaves_the_receiver_some() -> None:
    pool = Pool(blocks=1000)
    pool.add("w0", (4000, 500), (8000, 500))
    pool.add("w1", (4000, 500), (8000, 500))
    pool.tick()
    rebalancer = Rebalancer(RebalancePolicy(), "router", 0.0)
    newcomer = Newcomer("digest", 5000, 1)
    assert not rebalancer.plan(pool.seen(0), pool.own, 1.0, newcomer), "250 blocks would all go"


counts = st.lists(st.integers(0, 40), min_size=2, max_size=6)
lengths = st.lists(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 400)), max_size=12),
    min_size=2,
    max_size=5,
)


@settings(max_examples=examples(60), deadline=None)
@given(counts, st.floats(0.05, 2.0), st.integers(5, 120), st.sampled_from([0.0, 0.5, REPORT_S]))
def test_load_only_gets_more_even_and_moves_end(
    sizes: list[int], margin: float, budget: int, delay_s: float
) -> None:
    policy = RebalancePolicy(margin, budget)
    pool = pool_of(*sizes, policy=policy, delay_s=delay_s)
    mean = sum(sizes) / len(sizes)
    threshold = max(MIN_EXCESS, margin * mean)
    uneven = max(max(sizes) - mean, mean - min(sizes)) >= threshold
    began, last = pool.now, pool.now
    squares = sum(n * n for n in sizes)
    while pool.now < last + 65:
        seen = len(pool.moves)
        pool.tick()
        now = sum(n * n for n in pool.counts.values())
        assert now <= squares, "a move made loads less even"
        squares = now
        if len(pool.moves) > seen:
            last = pool.now
        assert last < began + 1200, "it does not come to rest"
        assert sum(at > pool.now - 60 for at, _ in pool.moves[-budget - 9 :]) <= budget
    moved = Counter(move.stream.key.request_id for _, move in pool.moves)
    if not uneven:
        assert not pool.moves
    else:
        assert pool.spread < 2
        # Each sequence moves at most once: nothing goes to and fro.
        assert all(times == 1 for times in moved.values())
        least = sum(max(0, n - -(-sum(sizes) // len(sizes))) for n in sizes)
        most = sum(max(0, n - sum(sizes) // len(sizes)) for n in sizes)
        assert least <= len(pool.moves) <= most


@settings(max_examples=examples(60), deadline=None)
@given(lengths, st.integers(1, 3))
def test_it_comes_to_rest_with_memory_too(
    workers: list[list[tuple[int, int]]], routers: int
) -> None:
    pool = Pool(blocks=400, routers=routers)
    for number, sequences in enumerate(workers):
        fitting: list[tuple[int, int]] = []
        for sequence in sequences:
            if sum(-(-size // BLOCK) for size, _ in (*fitting, sequence)) <= 400:
                fitting.append(sequence)
        pool.add(f"w{number}", *fitting)
    pool.run(400)
    seen = len(pool.moves)
    pool.run(100)
    assert len(pool.moves) == seen
    for worker in pool.workers:
        assert pool.used(worker) <= 400
    rested: dict[str, float] = {}
    for at, move in pool.moves:
        key = move.stream.key.request_id
        assert at >= rested.get(key, 0.0), "a sequence that moved rests"
        rested[key] = at + REST_S
        assert move.giver != move.receiver and move.stream.left >= MIN_LEFT


@pytest.mark.parametrize("routers", [2, 5, 12])
@pytest.mark.parametrize("delay_s", [0.0, 0.9])
def test_several_routers_do_not_stampede(routers: int, delay_s: float) -> None:
    pool = pool_of(60, 60, 0, routers=routers, delay_s=delay_s)
    pool.run(300)
    assert pool.spread <= max(MIN_EXCESS, 0.25 * 40) + MIN_EXCESS
    assert 30 <= len(pool.moves) <= 40 + 2 * routers
    assert all(move.reason is MoveReason.LOAD for _, move in pool.moves)
