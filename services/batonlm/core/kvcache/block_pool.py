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
step rewrites. A prefix is then worth nothing without the state behind it, so none is cached.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from batonlm.core.kvcache.cache_events import CachedUnits, OnChange, units_in
from batonlm.core.kvcache.prefix import PrefixChain, PrefixLink

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
        "num_published",
        "room_end",
    )

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_cached = 0
        """Leading blocks that came from the prefix cache."""
        self.num_published = 0
        """Leading blocks that can be found there."""
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


_GROWTH_ROOM = 16
"""A table that cannot grow in place goes on where it finds this many blocks in a row, so that it
can then grow in place for a while."""

_WORTH_EVICTING = 8
"""Blocks of the prefix cache that are evicted at most so that a table has room to grow into."""

_TAKEN, _UNUSED, _KEPT = b"\x00", b"\x01", b"\x02"
_RUNS = re.compile(_UNUSED + b"+")


class InvariantBroken(RuntimeError):
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
    ):
        """report: called with every unit that the prefix cache gains or loses (`CachedUnits`).
        state_positions: of the model's `KvLayout`."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one position")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_blocks = blocks_for(state_positions, block_size)
        """At the front of each table."""
        if num_blocks <= self.state_blocks:
            raise ValueError("a pool needs at least one block behind a sequence's state")
        self._state_positions = state_positions
        self._unused = bytearray(_UNUSED * num_blocks)
        self._num_unused = num_blocks
        self._num_kept = 0
        self._references = [0] * num_blocks
        self._links: dict[int, PrefixLink] = {}
        self._by_digest: dict[bytes, int] = {}
        self._units = CachedUnits(report)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._tables: set[BlockTable] = set()
        self._newest_launched = 0
        self._newest_completed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._claimed: list[int] = []
        self.num_uncopied = 0
        """Tables whose copies are not claimed yet."""

    @property
    def caches_prefixes(self) -> bool:
        return not self.state_blocks

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

    def allocate(
        self,
        num_blocks: int,
        chain: PrefixChain | None = None,
        max_cached: int = 0,
        keep_free: int = 0,
        room: int = 0,
    ) -> BlockTable | None:
        """A table of num_blocks, or None when fewer than keep_free would stay free after it.

        None changes nothing. room: by how many blocks it will likely grow.

        Up to max_cached leading blocks come from the prefix cache as far as `chain` is found there
        (`BlockTable.num_cached` is how many); they are shared and must not be written. The others
        are one run of consecutive ids where possible, following the last shared one if it can.
        """
        hits = []
        if chain is not None and self.caches_prefixes:
            hits = self._lookup(chain, min(max_cached, num_blocks))
        revived = sum(1 for block in hits if not self._references[block])
        if num_blocks - len(hits) + keep_free > self.num_free - revived:
            return None
        for block in hits:
            self._refer(block)
        table = BlockTable()
        table.num_cached = table.num_published = len(hits)
        table.extend(hits)
        self._take(table, num_blocks - len(hits), room)
        self._tables.add(table)
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
        copied = {i: min(size, self._state_positions - i * size) for i in range(state)}
        if partial:
            copied[state + full] = partial
        if copied:
            child.copies = tuple(
                BlockCopy(table.blocks[i], child.blocks[i], count) for i, count in copied.items()
            )
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
        """Lets others find the first num_blocks by their prefix. Their KV is computed."""
        if not self.caches_prefixes:
            return
        for index in range(table.num_published, num_blocks):
            link, block = chain.links[index], table.blocks[index]
            if link.digest not in self._by_digest:
                self._by_digest[link.digest] = block
                self._links[block] = link
                self._units.add(link)
        table.num_published = max(table.num_published, num_blocks)

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
        if self.num_uncopied != sum(bool(table.copies) for table in self._tables):
            raise InvariantBroken("tables that need a copy are miscounted")
        for block in range(self.num_blocks):
            if owned[block] != self._references[block]:
                raise InvariantBroken(f"block {block}: its references are miscounted")
            states = (owned[block] > 0, block in self._evictable, self._unused[block] != 0)
            if sum(states) != 1:
                raise InvariantBroken(f"block {block} is not in exactly one state")
            if states[2] and block in self._links:
                raise InvariantBroken(f"block {block} is unused and still named by a prefix")
            if states[1] and block not in self._links:
                raise InvariantBroken(f"block {block} is cached under no prefix")
        if self._num_unused != self.num_blocks - self._unused.count(_TAKEN):
            raise InvariantBroken("unused blocks are miscounted")
        if self._num_kept != self._unused.count(_KEPT):
            raise InvariantBroken("kept blocks are miscounted")
        if self._by_digest != {link.digest: block for block, link in self._links.items()}:
            raise InvariantBroken("the prefix cache's two directions differ")
        if self._units.present != units_in(self._links.values()):
            raise InvariantBroken("the units reported are not those in the prefix cache")

    def _lookup(self, chain: PrefixChain, limit: int) -> list[int]:
        hits: list[int] = []
        for link in chain.links[:limit]:
            block = self._by_digest.get(link.digest)
            if block is None or self._links[block] != link:
                break
            hits.append(block)
        return hits

    def _refer(self, block: int) -> None:
        if not self._references[block]:
            del self._evictable[block]
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
            if block in self._links:
                self._evictable[block] = None
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
            block, _ = self._evictable.popitem(last=False)
            link = self._links.pop(block)
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
