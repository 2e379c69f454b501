"""BlockPool, who owns every block of KV memory: ids and counts, never the memory itself.

A block is in exactly one of three states:

    owned    referenced by tables, by pending copies or by frees that wait for a step
    cached   without owner, its content can be found by its prefix; evicted oldest first
    unused   without owner, its content is worth nothing

Attention reads a run of consecutive blocks where it lies and gathers what is scattered, so a table
that will grow is placed where unused blocks follow. These are *kept* for it: others take them only
when nothing else is left. That is a preference and no ownership; they count as free.

Ownership is a `BlockTable`, which is released exactly once. Steps in flight still read and write
blocks whose table was released, so the pool itself keeps those references until the newest step
launched before the release is done. That takes a call of `launched` and `completed` for each step,
in order. Swap memory has owners in the same way (`SwapSpace`).

Where the model's layers keep a state, each table begins with blocks of its own for it, which every
step rewrites. Computing goes on from a cached prefix only where the state behind it is known, too:
a `StateSnapshot`, blocks with a copy of a sequence's state, which a step makes at positions that
are multiples of `snapshot_positions`. Snapshots are cached like KV: evicted oldest first, gone with
their prefix's last block, and never more than a quarter of the pool.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import NamedTuple

from batonlm.core.kvcache.cache_events import CachedUnits, OnChange, units_in
from batonlm.core.kvcache.prefix import UNIT_TOKENS, PrefixChain, PrefixLink, UnitName

Extents = tuple[tuple[int, int], ...]
"""A BlockTable as runs of consecutive ids: (first block, number of blocks), in position order."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first num_positions of a block into another one (copy on write)."""

    source: int
    target: int
    num_positions: int


def blocks_for(num_positions: int, block_size: int) -> int:
    """How many blocks hold so many positions."""
    return -(-num_positions // block_size)


class BlockTable:
    """A sequence's blocks, those of its state first, then in position order, owned until
    `BlockPool.release`. Only the pool changes it."""

    __slots__ = (
        "_extents",
        "_runs",
        "blocks",
        "copies",
        "num_cached",
        "num_known",
        "num_published",
        "room_end",
    )

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_cached = 0
        """Leading blocks of positions that came from the prefix cache."""
        self.num_known = 0
        """Leading blocks of positions that were found there; without the state behind them, some
        were not taken."""
        self.num_published = 0
        """Leading blocks of positions that can be found there."""
        self.room_end = 0
        """The block at which the room ends that the pool kept behind the last one, or less."""
        self.copies: tuple[BlockCopy, ...] = ()
        """What has to be copied into this table before its first step."""
        self._runs: list[tuple[int, int]] = []
        self._extents: Extents | None = ()

    @property
    def extents(self) -> Extents:
        """The blocks as runs of consecutive ids. The same object until the table grows."""
        if self._extents is None:
            self._extents = tuple(self._runs)
        return self._extents

    def extend(self, blocks: Iterable[int]) -> None:
        runs = self._runs
        for block in blocks:
            self.blocks.append(block)
            if runs and sum(runs[-1]) == block:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        self._extents = None


@dataclass(slots=True, eq=False)
class StateSnapshot:
    """Blocks with a copy of a sequence's state, made by the step that was planned when they were
    taken. Whoever took it returns it when that step is done: `BlockPool.keep` or `drop_snapshot`.
    """

    blocks: tuple[int, ...]
    extents: Extents
    link: PrefixLink | None = None
    """The last block of the prefix with which it can be found, while it can."""


@dataclass(slots=True, eq=False)
class CachedUnit:
    """A unit of the prefix cache that may be copied elsewhere. Nothing is pinned for it: a copy is
    worth something if the unit is still intact when it is done."""

    name: UnitName
    extents: Extents
    """Its blocks, one by one."""
    intact: bool = True
    """Whether none of its blocks was evicted since."""


_SPILL_SHARE = 2
"""Units are copied elsewhere while fewer than the pool's blocks divided by this could be taken
without losing any that were not."""

_SNAPSHOT_SHARE = 4
"""Snapshots take at most the pool's blocks divided by this."""

_LONE_COST = 4
"""A position computed alone takes as long as so many of a chunk."""

_GROWTH_ROOM = 16
"""A table that cannot grow in place goes on where it finds this many blocks in a row, so that it
can then grow in place for a while."""

_WORTH_EVICTING = 8
"""Blocks of the prefix cache that are evicted at most so that a table has room to grow into."""

_TAKEN, _UNUSED, _KEPT = b"\x00", b"\x01", b"\x02"
_RUNS = re.compile(_UNUSED + b"+")


class InvariantBroken(Exception):
    """The pool's books do not agree with themselves: a fault of Baton, memory is not safe."""


class BlockPool:
    """num_blocks blocks of block_size token positions each, ids from 0."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        report: OnChange = lambda change: None,
        *,
        state_positions: int = 0,
        snapshot_positions: int = 0,
        stepwise: bool = False,
    ):
        """report: called with every unit that the prefix cache gains or loses (`CachedUnits`).
        state_positions: of the model's `KvLayout`. snapshot_positions: a multiple of block_size; 0:
        as few as routers can tell apart. stepwise: a state is taken up by single positions only, so
        what follows a prefix costs more than it does in one piece with it.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one position")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_blocks = blocks_for(state_positions, block_size)
        """At the front of each table."""
        if num_blocks <= self.state_blocks:
            raise ValueError("a pool needs at least one block behind a sequence's state")
        self.snapshot_positions = snapshot_positions or lcm(block_size, UNIT_TOKENS)
        """States are kept behind multiples of so many positions."""
        self._state_positions = state_positions
        self._stepwise = stepwise
        self._unused = bytearray(_UNUSED * num_blocks)
        self._num_unused = num_blocks
        self._num_kept = 0
        self._references = [0] * num_blocks
        self._links: dict[int, PrefixLink] = {}
        self._by_digest: dict[bytes, int] = {}
        self._units = CachedUnits(report, marked_only=state_positions > 0)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._tables: set[BlockTable] = set()
        self._snapshots: OrderedDict[bytes, StateSnapshot] = OrderedDict()
        """Those that can be found, by their links' digests, least recently used first."""
        self._saved: dict[int, StateSnapshot] = {}
        """The same by each of their blocks."""
        self._unmade: set[StateSnapshot] = set()
        """Those that belong to a step in flight."""
        self._unspilled: OrderedDict[int, None] = OrderedDict()
        """Evictable blocks in which a unit ends that was not spilled since its last use."""
        self._spilling: dict[int, CachedUnit] = {}
        """What was spilled last, by each of its blocks."""
        self._newest_launched = 0
        self._newest_completed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._claimed: list[int] = []
        self.num_uncopied = 0
        """Tables whose copies are not claimed yet."""

    @property
    def num_snapshots(self) -> int:
        """Those that can be found, and those in the making."""
        return len(self._snapshots) + len(self._unmade)

    def snapshot_worth(self, position: int, num_positions: int) -> bool:
        """Whether it is quicker to compute an input of num_positions from the state behind one of
        them than as a whole."""
        behind = num_positions - position
        return not self._stepwise or behind * _LONE_COST <= position

    @property
    def num_positions(self) -> int:
        """Of a sequence that has the whole pool."""
        return (self.num_blocks - self.state_blocks) * self.block_size

    def blocks_for(self, num_positions: int) -> int:
        """How many blocks a table of so many positions has."""
        return self.state_blocks + blocks_for(num_positions, self.block_size)

    def room(self, table: BlockTable) -> int:
        """How many positions a table has blocks for."""
        return (len(table.blocks) - self.state_blocks) * self.block_size

    @property
    def num_free(self) -> int:
        """Blocks that an allocation may take, cached ones included."""
        return self._num_unused + len(self._evictable)

    @property
    def num_tables(self) -> int:
        """Tables that are not released; 0 when nothing runs, or something has leaked."""
        return len(self._tables)

    @property
    def num_returning(self) -> int:
        """Blocks that will be free once the steps in flight are done."""
        released = Counter(block for _, blocks in self._deferred for block in blocks)
        return sum(self._references[block] == count for block, count in released.items())

    def num_shared(self, table: BlockTable) -> int:
        """How many of a table's leading blocks have another owner, too."""
        shared = 0
        while shared < len(table.blocks) and self._references[table.blocks[shared]] > 1:
            shared += 1
        return shared

    def num_found(self, chain: PrefixChain, limit: int) -> int:
        """How many of a chain's first `limit` blocks are in the prefix cache, without a gap."""
        return len(self._lookup(chain, limit))

    def allocate(
        self,
        num_blocks: int,
        chain: PrefixChain | None = None,
        max_cached: int = 0,
        keep_free: int = 0,
        room: int = 0,
        *,
        computes: int = 0,
    ) -> BlockTable | None:
        """A table of num_blocks, or None when fewer than keep_free would stay free after it.

        None changes nothing. room: by how many blocks it will likely grow.

        Up to max_cached leading blocks of positions come from the prefix cache as far as `chain` is
        found there (`BlockTable.num_cached` is how many); they are shared and must not be written.
        The others are one run of consecutive ids where possible, following the last shared one if
        it can.

        computes: the length of the input of which the rest is computed, for which the state behind
        the cached blocks has to be there, too; it is put into the table by `BlockTable.copies`,
        which `claim_copies` puts into the step that computes the first of the rest. 0: the state
        comes from elsewhere.
        """
        state = self.state_blocks
        known = [] if chain is None else self._lookup(chain, min(max_cached, num_blocks - state))
        found: list[tuple[list[int], StateSnapshot | None]] = [(known, None)]
        if state and computes and chain is not None:
            count, snapshot = self._deepest(chain, len(known), computes)
            # Whoever takes all of the pool has no room for a copy beside it.
            found = [(known[:count], snapshot), ([], None)] if snapshot else [([], None)]
        for hits, snapshot in found:
            copied = snapshot.blocks if snapshot is not None else ()
            revived = sum(1 for block in (*hits, *copied) if not self._references[block])
            if num_blocks - len(hits) + keep_free <= self.num_free - revived:
                break
        else:
            return None
        for block in (*hits, *copied):
            self._refer(block)
        table = BlockTable()
        table.num_cached = table.num_published = len(hits)
        table.num_known = len(known)
        if state and hits:
            self._take(table, state, 0)
        table.extend(hits)
        self._take(table, num_blocks - len(table.blocks), room)
        self._tables.add(table)
        if snapshot is not None:
            assert snapshot.link is not None
            self._snapshots.move_to_end(snapshot.link.digest)
            table.copies = self._state_copies(copied, table.blocks)
            self.num_uncopied += 1
        return table

    def fork(
        self, table: BlockTable, num_positions: int, num_blocks: int, room: int = 0
    ) -> BlockTable | None:
        """A table of num_blocks that begins with the first num_positions of another one.

        Full blocks are shared and must not be written by either. The state, and a last, partial
        block, get blocks of their own, filled by `BlockTable.copies`, which `claim_copies` puts
        into a step: the first one in which either table's next position is computed. None when
        there are not enough blocks; then nothing has changed.
        """
        if num_blocks < self.blocks_for(num_positions):
            raise ValueError("a fork must hold the positions it begins with")
        state, size = self.state_blocks, self.block_size
        full, partial = divmod(num_positions, size)
        shared = table.blocks[state : state + full]
        if num_blocks - full > self.num_free:
            return None
        child = BlockTable()
        child.num_published = full
        for block in shared:
            self._refer(block)
        self._take(child, state, 0)
        child.extend(shared)
        self._take(child, num_blocks - state - full, room)
        child.copies = self._state_copies(table.blocks, child.blocks)
        if partial:
            last = state + full
            child.copies += (BlockCopy(table.blocks[last], child.blocks[last], partial),)
        if child.copies:
            self.num_uncopied += 1
            for copy in child.copies:
                self._refer(copy.source)
        self._tables.add(child)
        return child

    def claim_copies(self, table: BlockTable) -> tuple[BlockCopy, ...]:
        """The copies that a fork still needs, for the step that is planned now and launched next.

        Their sources stay owned until that step is done, whatever becomes of the table they are
        from.
        """
        copies, table.copies = table.copies, ()
        if copies:
            self.num_uncopied -= 1
            self._claimed += [copy.source for copy in copies]
        return copies

    def grow(self, table: BlockTable) -> bool:
        """Appends one block, in place if possible. False when there is none."""
        if not self.num_free:
            return False
        self._take(table, 1, 0)
        return True

    def publish(self, table: BlockTable, chain: PrefixChain, num_blocks: int) -> None:
        """Lets others find the first num_blocks of positions by their prefix. Their KV is
        computed."""
        for index in range(table.num_published, num_blocks):
            link, block = chain.links[index], table.blocks[self.state_blocks + index]
            if link.digest not in self._by_digest:
                self._by_digest[link.digest] = block
                self._links[block] = link
                self._units.add(link)
        table.num_published = max(table.num_published, num_blocks)

    def spill(self, count: int, *, everything: bool = False) -> list[CachedUnit]:
        """The units that will be evicted first, `count` at most, for whoever copies them to another
        tier; each once after every use. None while enough blocks could be taken without a loss,
        unless `everything` is to be copied. What was spilled before is not looked after any more.

        Of a model with a state none, and none where units do not end with blocks.
        """
        self._spilling.clear()
        size, rest = divmod(UNIT_TOKENS, self.block_size)
        if self.state_blocks or rest:
            return []
        found: list[CachedUnit] = []
        while self._unspilled and len(found) < count:
            lossless = self.num_free - size * len(self._unspilled)
            if not everything and lossless >= self.num_blocks // _SPILL_SHARE:
                break
            blocks = [self._unspilled.popitem(last=False)[0]]
            link = end = self._links[blocks[0]]
            while len(blocks) < size and (before := self._by_digest.get(link.parent)) is not None:
                blocks.append(before)
                link = self._links[before]
            # Without its beginning it is lost already.
            if len(blocks) == size:
                first = (end.depth + 1) * self.block_size - UNIT_TOKENS
                name = UnitName(end.units[-1], end.parent_unit, end.namespace, first)
                unit = CachedUnit(name, tuple((block, 1) for block in reversed(blocks)))
                self._spilling |= dict.fromkeys(blocks, unit)
                found.append(unit)
        return found

    def snapshot(self, keep_free: int = 0) -> StateSnapshot | None:
        """Takes blocks for a copy of a state that the step makes which is planned now and launched
        next. None when fewer than keep_free would stay free, or snapshots have their share of the
        pool and none is left to evict."""
        state = self.state_blocks
        if not state or state + keep_free > self.num_free:
            return None
        if (self.num_snapshots + 1) * state > self.num_blocks // _SNAPSHOT_SHARE:
            if not self._snapshots:
                return None
            self._evict_snapshot(next(iter(self._snapshots.values())))
        holder = BlockTable()
        self._take(holder, state, 0)
        snapshot = StateSnapshot(tuple(holder.blocks), holder.extents)
        self._unmade.add(snapshot)
        return snapshot

    def keep(self, snapshot: StateSnapshot, link: PrefixLink) -> bool:
        """The step that made a snapshot is done: it holds the state behind a prefix, with whose KV
        it can be found from now on. Without that KV, or where that has a snapshot, it is dropped.
        Returns whether it was kept."""
        block = self._by_digest.get(link.digest)
        kept = block is not None and self._links[block] == link
        kept = kept and link.digest not in self._snapshots
        if kept:
            snapshot.link = link
            self._snapshots[link.digest] = snapshot
            self._saved |= dict.fromkeys(snapshot.blocks, snapshot)
            self._units.mark(link)
        self._unmade.remove(snapshot)
        self._drop(list(snapshot.blocks))
        return kept

    def drop_snapshot(self, snapshot: StateSnapshot) -> None:
        """Gives a snapshot up, whether it is in the making, can be found, or was evicted."""
        if snapshot in self._unmade:
            self._unmade.remove(snapshot)
            self._drop(list(snapshot.blocks))
        elif snapshot.link is not None:
            self._evict_snapshot(snapshot)

    def release(self, table: BlockTable) -> None:
        """Gives a table up. Its blocks are free once no step in flight can touch them.

        Raises RuntimeError for a table that is not owned (any more).
        """
        if table not in self._tables:
            raise RuntimeError("this block table was released before")
        self._tables.remove(table)
        if table.blocks:
            self._mark(table.blocks[-1] + 1, table.room_end, _KEPT, _UNUSED)
        # Last block first: of a cached prefix the head is worth more, so it is evicted later.
        blocks = table.blocks[::-1]
        if table.copies:
            self.num_uncopied -= 1
            blocks += [copy.source for copy in table.copies]
        self._drop(blocks)

    def launched(self, step: int) -> None:
        """A step that may touch all blocks owned so far starts. Numbers only grow."""
        if step <= self._newest_launched:
            raise ValueError(f"step {step} after step {self._newest_launched}")
        self._newest_launched = step
        claimed, self._claimed = self._claimed, []
        if claimed:
            self._drop(claimed)

    def withhold(self, blocks: Iterable[int]) -> None:
        """Of blocks that the newest launched step still reads though their owner gave them up for
        it: those that got no other owner meanwhile are free only when that step is done."""
        free = [block for block in blocks if not self._references[block]]
        for block in free:
            if block in self._evictable:
                self._refer(block)
            else:
                self._num_kept -= self._unused.count(_KEPT, block, block + 1)
                self._unused[block : block + 1] = _TAKEN
                self._num_unused -= 1
                self._references[block] = 1
        if free:
            self._drop(free)

    def completed(self, step: int) -> None:
        """This step, and so every one before it, touches no block any more."""
        if not self._newest_completed < step <= self._newest_launched:
            raise ValueError(f"step {step} was not in flight")
        self._newest_completed = step
        while self._deferred and self._deferred[0][0] <= step:
            self._unrefer(self._deferred.popleft()[1])

    def check(self) -> None:
        """Raises InvariantBroken unless every invariant holds. Costs time per block."""
        owned: Counter[int] = Counter(self._claimed)
        for _, blocks in self._deferred:
            owned.update(blocks)
        for table in self._tables:
            owned.update(table.blocks)
            owned.update(copy.source for copy in table.copies)
            if len(set(table.blocks)) != len(table.blocks):
                raise InvariantBroken("a table names a block twice")
            covered = [first + i for first, count in table.extents for i in range(count)]
            if covered != table.blocks:
                raise InvariantBroken("a table's extents are not its blocks")
        for snapshot in self._unmade:
            owned.update(snapshot.blocks)
        if self.num_uncopied != sum(bool(table.copies) for table in self._tables):
            raise InvariantBroken("tables that need a copy are miscounted")
        for block in range(self.num_blocks):
            if owned[block] != self._references[block]:
                raise InvariantBroken(f"block {block}: its references are miscounted")
            states = (owned[block] > 0, block in self._evictable, self._unused[block] != 0)
            if sum(states) != 1:
                raise InvariantBroken(f"block {block} is not in exactly one state")
            named = (block in self._links) + (block in self._saved)
            if states[2] and named:
                raise InvariantBroken(f"block {block} is unused and still named by a prefix")
            if named > 1 or states[1] > named:
                raise InvariantBroken(f"block {block} is cached under no prefix, or as two things")
        if not self._unspilled.keys() <= self._evictable.keys() & self._links.keys():
            raise InvariantBroken("units are to be spilled that are not about to be evicted")
        if self._num_unused != self.num_blocks - self._unused.count(_TAKEN):
            raise InvariantBroken("unused blocks are miscounted")
        if self._num_kept != self._unused.count(_KEPT):
            raise InvariantBroken("kept blocks are miscounted")
        if self._by_digest != {link.digest: block for block, link in self._links.items()}:
            raise InvariantBroken("the prefix cache's two directions differ")
        if self._saved != {b: each for each in self._snapshots.values() for b in each.blocks}:
            raise InvariantBroken("snapshots' blocks are not those that are saved")
        if self.num_snapshots * self.state_blocks > self.num_blocks // _SNAPSHOT_SHARE:
            raise InvariantBroken("snapshots take more than their share")
        for digest, snapshot in self._snapshots.items():
            if snapshot.link != self._links.get(self._by_digest.get(digest, -1)):
                raise InvariantBroken("a snapshot is kept without its prefix")
        marked = self._snapshots.keys() if self.state_blocks else None
        if self._units.present != units_in(self._links.values(), marked):
            raise InvariantBroken("the units reported are not those in the prefix cache")

    def _lookup(self, chain: PrefixChain, limit: int) -> list[int]:
        hits: list[int] = []
        for link in chain.links[:limit]:
            block = self._by_digest.get(link.digest)
            if block is None or self._links[block] != link:
                break
            hits.append(block)
        return hits

    def _deepest(
        self, chain: PrefixChain, limit: int, computes: int
    ) -> tuple[int, StateSnapshot | None]:
        """The longest prefix of at most `limit` blocks whose state is kept, in blocks, and that
        state."""
        for count in range(limit, 0, -1):
            if not self.snapshot_worth(count * self.block_size, computes):
                break
            snapshot = self._snapshots.get(chain.links[count - 1].digest)
            if snapshot is not None and snapshot.link == chain.links[count - 1]:
                return count, snapshot
        return 0, None

    def _state_copies(
        self, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[BlockCopy, ...]:
        """Of the state at the front of some blocks to the front of others."""
        size, num_positions = self.block_size, self._state_positions
        return tuple(
            BlockCopy(sources[i], targets[i], min(size, num_positions - i * size))
            for i in range(self.state_blocks)
        )

    def _evict_snapshot(self, snapshot: StateSnapshot) -> None:
        assert snapshot.link is not None
        self._units.unmark(snapshot.link)
        del self._snapshots[snapshot.link.digest]
        snapshot.link = None
        for block in snapshot.blocks:
            del self._saved[block]
            if not self._references[block]:
                del self._evictable[block]
                self._unused[block : block + 1] = _UNUSED
                self._num_unused += 1

    def _refer(self, block: int) -> None:
        if not self._references[block]:
            del self._evictable[block]
            self._unspilled.pop(block, None)
        self._references[block] += 1

    def _drop(self, blocks: list[int]) -> None:
        if self._newest_launched > self._newest_completed:
            self._deferred.append((self._newest_launched, blocks))
        else:
            self._unrefer(blocks)

    def _unrefer(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._links or block in self._saved:
                self._evictable[block] = None
                if block in self._links and self._links[block].units:
                    self._unspilled[block] = None
            else:
                self._unused[block] = 1
                self._num_unused += 1

    def _take(self, table: BlockTable, count: int, room: int) -> None:
        """Gives a table so many free blocks more. There are enough."""
        if not count:
            return
        after = table.blocks[-1] + 1 if table.blocks else None
        if after is not None and self._fits(after, count):
            places = [(after, count)]
        else:
            room = max(room, _GROWTH_ROOM if after is not None else 0)
            self._evict(count + min(room, _WORTH_EVICTING))
            places = self._place(count, room)
        for first, size in places:
            self._num_kept -= self._unused.count(_KEPT, first, first + size)
            self._unused[first : first + size] = _TAKEN * size
            table.extend(range(first, first + size))
        self._num_unused -= count
        for block in table.blocks[-count:]:
            self._references[block] = 1
        if room:
            self._keep(table, room)

    def _fits(self, first: int, count: int) -> bool:
        """Whether so many blocks from here on are unused, be they kept or not."""
        end = first + count
        return end <= self.num_blocks and self._unused.find(_TAKEN, first, end) < 0

    def _evict(self, count: int) -> None:
        """Until so many blocks are unused and not kept, or the prefix cache is empty."""
        while self._num_unused - self._num_kept < count and self._evictable:
            block = next(iter(self._evictable))
            if (snapshot := self._saved.get(block)) is not None:
                self._evict_snapshot(snapshot)
                continue
            del self._evictable[block]
            self._unspilled.pop(block, None)
            if (unit := self._spilling.get(block)) is not None:
                unit.intact = False
            link = self._links.pop(block)
            if (snapshot := self._snapshots.get(link.digest)) is not None:
                self._evict_snapshot(snapshot)
            del self._by_digest[link.digest]
            self._units.remove(link)
            self._unused[block : block + 1] = _UNUSED
            self._num_unused += 1

    def _place(self, count: int, room: int) -> list[tuple[int, int]]:
        """Chooses unused blocks: first fit with room behind, else first fit, else the fewest
        runs; only when there are too few, of what is kept for others."""
        if self._num_unused - self._num_kept < count:
            self._mark(0, self.num_blocks, _KEPT, _UNUSED)
        for wanted in (count + room, count):
            first = self._unused.find(_UNUSED * wanted)
            if first >= 0:
                return [(first, count)]
        places = []
        for size, first in sorted(
            (m.start() - m.end(), m.start()) for m in _RUNS.finditer(self._unused)
        ):
            places.append((first, min(-size, count)))
            count -= places[-1][1]
            if not count:
                break
        return places

    def _keep(self, table: BlockTable, room: int) -> None:
        """Keeps up to so many unused blocks that follow a table's last one."""
        first = table.blocks[-1] + 1
        found = _RUNS.match(self._unused, first, first + room)
        if found is not None:
            table.room_end = found.end()
            self._mark(first, found.end(), _UNUSED, _KEPT)

    def _mark(self, first: int, end: int, old: bytes, new: bytes) -> None:
        """Changes unused blocks of a range from kept to not kept, or back."""
        if first >= end:
            return
        part = self._unused[first:end]
        changed = part.count(old)
        self._unused[first:end] = part.replace(old, new)
        self._num_kept += changed if new == _KEPT else -changed


class SwapPlace(Enum):
    """Kinds of swap memory, the faster one first."""

    HOST = "host"
    DISK = "disk"


class SwapGrant(NamedTuple):
    """Blocks of one kind of swap memory, owned until `SwapSpace.release`."""

    place: SwapPlace
    table: BlockTable
    blocks: tuple[int, ...]
    """In position order of what they hold."""


class SwapSpace:
    """Who owns which blocks of swap memory. Each kind is a pool of its own, so a step in flight may
    still touch what is released, see `BlockPool`."""

    def __init__(self, host_blocks: int = 0, disk_blocks: int = 0):
        """Block ids count from 0: first those in host memory, then those on disk."""
        self._sizes = {SwapPlace.HOST: host_blocks, SwapPlace.DISK: disk_blocks}
        self._first = {SwapPlace.HOST: 0, SwapPlace.DISK: host_blocks}
        self._pools = {place: BlockPool(size, 1) for place, size in self._sizes.items() if size}

    @property
    def num_grants(self) -> int:
        """Grants that are not released; 0 when nothing is swapped out, or something has leaked."""
        return sum(pool.num_tables for pool in self._pools.values())

    @property
    def num_free(self) -> tuple[int, int]:
        """In host memory and on disk."""
        return self._num_free(SwapPlace.HOST), self._num_free(SwapPlace.DISK)

    @property
    def num_used(self) -> tuple[int, int]:
        """In host memory and on disk."""
        host, disk = self.num_free
        return self._sizes[SwapPlace.HOST] - host, self._sizes[SwapPlace.DISK] - disk

    def place_for(self, num_blocks: int) -> SwapPlace | None:
        """The fastest kind with so many free blocks, or None."""
        return next((place for place in SwapPlace if self._num_free(place) >= num_blocks), None)

    def take(self, place: SwapPlace, num_blocks: int) -> SwapGrant:
        """Raises ValueError when there are not so many."""
        pool = self._pools.get(place)
        table = pool.allocate(num_blocks) if pool is not None else None
        if table is None:
            raise ValueError(f"{num_blocks} swap blocks cannot be taken")
        first = self._first[place]
        return SwapGrant(place, table, tuple(first + block for block in table.blocks))

    def release(self, grant: SwapGrant) -> None:
        """Gives blocks up. Raises RuntimeError for a grant that is not owned (any more)."""
        self._pools[grant.place].release(grant.table)

    def launched(self, step: int) -> None:
        """A step that may touch all blocks owned so far starts. Numbers only grow."""
        for pool in self._pools.values():
            pool.launched(step)

    def completed(self, step: int) -> None:
        """This step, and so every one before it, touches no block any more."""
        for pool in self._pools.values():
            pool.completed(step)

    def check(self) -> None:
        """Raises InvariantBroken unless every block is free, owned or deferred, exactly once."""
        for pool in self._pools.values():
            pool.check()

    def _num_free(self, place: SwapPlace) -> int:
        pool = self._pools.get(place)
        return 0 if pool is None else pool.num_free
