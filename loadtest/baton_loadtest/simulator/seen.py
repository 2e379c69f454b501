"""Seen and SeenPool, a fleet's workers as the router sees them: from reports that are a little old.

What the router has given to a worker since counts at once, as in the router itself.
"""

from __future__ import annotations

from baton.core.kvcache.cache_events import CacheBatch
from baton.core.request.model import WorkerIdentity
from baton.core.routing.load import WorkerLedger, WorkerLoad, WorkerSnapshot
from baton.core.routing.prefix_index import PrefixIndex
from baton.core.routing.routing import PoolView
from baton_loadtest.simulator.settings import FleetFacts, WorkerFacts


class Seen:
    """One worker. number: in its pool."""

    def __init__(self, pool: SeenPool, number: int) -> None:
        self.number = number
        self.identity = WorkerIdentity(pool.role, f"{pool.role[0]}{number:07d}", "")
        self.books = WorkerLedger()
        self._pool = pool
        self._index_number = pool.index.join()
        self.load: WorkerLoad | None = None
        self.is_gone = False
        self.placed_sequences = 0
        self._placed_tokens = 0
        self._fresh = [0, 0, 0]

    def gone(self) -> None:
        """It is no more: nobody gets a place there, and nobody finds a prefix."""
        self.load = None
        self.is_gone = True
        self._pool.index.leave(self._index_number)
        self.changed()

    def report(self, load: WorkerLoad, batches: list[CacheBatch]) -> None:
        if self.is_gone:
            return
        self.load = load
        self._fresh = [0, 0, 0]
        for batch in batches:
            self._pool.index.apply(self._index_number, batch)
        self.changed()

    def place(self, tokens: int, positions: int) -> None:
        """Gives it a sequence with so many positions, and so many tokens to prefill."""
        self.placed_sequences += 1
        self._placed_tokens += tokens
        self._fresh = [self._fresh[0] + 1, self._fresh[1] + tokens, self._fresh[2] + positions]
        self.changed()

    def take_back(self, sequences: int, tokens: int) -> None:
        self.placed_sequences -= sequences
        self._placed_tokens -= tokens
        self.changed()

    def changed(self) -> None:
        """Something that the router decides by."""
        self.books.read(self.load, self.placed_sequences)
        facts = self._pool.facts
        places = facts.max_running if self._pool.role == "decode" else 0
        name = self.identity.instance_id
        if self.books.is_full(self.placed_sequences, places):
            self._pool.full.add(name)
        else:
            self._pool.full.discard(name)
        self._pool.stale.add(self.number)

    def has_kv(self, positions: int) -> bool:
        return self.books.has_kv(self.placed_sequences, self._pool.facts.block_size, positions)

    def snapshot(self) -> WorkerSnapshot | None:
        """None before its first report."""
        if self.load is None:
            return None
        pool = self._pool
        sequences, tokens, positions = self._fresh
        return WorkerSnapshot(
            self.identity,
            pool.fleet.model,
            self.load,
            pool.fleet.layout,
            ("simulated",),
            pool.facts.block_size,
            pool.facts.num_blocks,
            pool.fleet.kv_bytes,
            pool.facts.max_running if pool.role == "decode" else 0,
            number=self._index_number,
            placed_sequences=self.placed_sequences,
            placed_tokens=self._placed_tokens,
            fresh_sequences=sequences,
            fresh_tokens=tokens,
            fresh_positions=positions,
        )


class SeenPool:
    """All workers of a role. full: instance ids that should get nothing more now; shared by both
    pools. stale: whose snapshots have to be made again."""

    def __init__(
        self, role: str, facts: WorkerFacts, fleet: FleetFacts, count: int, full: set[str]
    ) -> None:
        self.role = role
        self.facts = facts
        self.fleet = fleet
        self.full = full
        self.index = PrefixIndex()
        self.stale: set[int] = set()
        self.workers: list[Seen] = []
        self._snapshots: list[WorkerSnapshot | None] = []
        self._by_name: dict[str, Seen] = {}
        for _ in range(count):
            self.join()

    def join(self) -> int:
        """Another worker's number."""
        seen = Seen(self, len(self.workers))
        self.workers.append(seen)
        self._snapshots.append(None)
        self._by_name[seen.identity.instance_id] = seen
        return seen.number

    def get(self, identity: WorkerIdentity | None) -> Seen | None:
        return None if identity is None else self._by_name[identity.instance_id]

    def view(self, hashes: bytes) -> PoolView:
        for number in self.stale:
            self._snapshots[number] = self.workers[number].snapshot()
        self.stale.clear()
        found = [snapshot for snapshot in self._snapshots if snapshot is not None]
        return PoolView(found, self.index.find(hashes))
