"""PrefixIndex: which workers hold which prefixes.

Its input is every worker's numbered cache events (see `core.cache_log`). One dictionary maps each
unit to the workers that hold it, as the bits of an int, so a few look-ups match a prompt's hashes
against a thousand workers. A unit's key is the first half of its hash. Workers hold prefixes from
the start, so a unit that is found implies all before it; a unit that is left out only makes a
worker's prefix look shorter than it is. Workers whose model keeps a state tell the ends of prefixes
alone, behind which they have the state.

The index is bounded: a worker may fill an equal share of it, and never more than max_per_worker.
Later units beyond that are left out. When more workers join and shares shrink, the newest units are
dropped; the oldest are the beginnings, which most prompts have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from batonlm.core.kvcache.block_pool import InvariantBroken
from batonlm.core.kvcache.cache_events import CacheBatch
from batonlm.core.kvcache.prefix import HASH_BYTES

MAX_ENTRIES = 262_144
MAX_PER_WORKER = 32_768
"""In units; about two million tokens."""

BYTES_PER_ENTRY = 320
"""Most bytes of an entry, with a thousand workers."""

_WORDS = HASH_BYTES // 8


@dataclass(frozen=True, slots=True)
class Overlap:
    """What workers hold of one prompt."""

    groups: tuple[tuple[int, int], ...] = ()
    """(units, workers as bits), most units first. A worker is in at most one group; workers without
    any unit are in none."""

    def units(self, worker: int) -> int:
        """Returns the units of the prompt that a worker holds; 0 for a negative number, which is no
        worker."""
        if worker >= 0:
            for units, workers in self.groups:
                if workers >> worker & 1:
                    return units
        return 0

    def most(self, count: int, start: int) -> set[int]:
        """Returns up to `count` workers that hold the most units; among equals, those from number
        `start` on first."""
        found: set[int] = set()
        for _, workers in self.groups:
            above = workers >> start << start
            for number in chain(_bits(above), _bits(workers ^ above)):
                if len(found) == count:
                    return found
                found.add(number)
        return found


NO_OVERLAP = Overlap()


class _Holding:
    """What is known about one worker."""

    __slots__ = ("bit", "in_snapshot", "number", "units")

    def __init__(self, worker: int) -> None:
        """`number` is that of the next event; None: unknown since a gap."""
        self.bit = 1 << worker
        self.units: dict[int, None] = {}
        self.number: int | None = None
        self.in_snapshot = False


class PrefixIndex:
    """Maps units to workers. Workers are small numbers that `join` returns and reuses after
    `leave`."""

    def __init__(
        self, max_entries: int = MAX_ENTRIES, max_per_worker: int = MAX_PER_WORKER
    ) -> None:
        """max_entries: most pairs of a worker and a unit that it holds."""
        self._max_entries = max_entries
        self._max_per_worker = max_per_worker
        self._holders: dict[int, int] = {}
        self._holdings: dict[int, _Holding] = {}
        self._numbers: list[int] = []
        self._everyone = 0
        self._with_gaps = 0
        self._share = max_per_worker
        self._entries = 0
        self.gaps = 0
        """How often events were missing."""

    def __len__(self) -> int:
        """The number of entries."""
        return self._entries

    def join(self, *, gaps: bool = False) -> int:
        """Adds a worker about which nothing is known yet. Returns its number, the smallest free
        one. gaps: whether it can use a unit without those before it, and has not all of these."""
        number = heappop(self._numbers) if self._numbers else len(self._holdings)
        self._holdings[number] = holding = _Holding(number)
        self._everyone |= holding.bit
        self._with_gaps |= holding.bit if gaps else 0
        self._share_out()
        return number

    def leave(self, worker: int) -> None:
        """Removes a worker and all its entries."""
        self._clear(self._holdings[worker])
        bit = self._holdings.pop(worker).bit
        self._everyone ^= bit
        self._with_gaps &= ~bit
        heappush(self._numbers, worker)
        self._share_out()

    def apply(self, worker: int, batch: CacheBatch) -> bool:
        """Applies cache events of a worker. Returns False when events before the batch are missing;
        the worker then has no entries until its next snapshot."""
        holding = self._holdings[worker]
        if batch.snapshot:
            if not holding.in_snapshot or batch.first_number != holding.number:
                self._clear(holding)
        elif batch.first_number != holding.number:
            self._clear(holding)
            holding.number, holding.in_snapshot = None, False
            self.gaps += 1
            return False
        holding.number, holding.in_snapshot = batch.next_number, batch.snapshot
        for unit in _keys(batch.removed):
            if unit in holding.units:
                del holding.units[unit]
                self._let_go(holding, unit)
        self._add(holding, _keys(batch.added))
        return True

    def find(self, hashes: bytes) -> Overlap:
        """Returns what workers hold of a prompt. hashes: of its units, concatenated.

        Bisects for all workers at once: the number of look-ups grows with the number of different
        lengths found, times the logarithm of the prompt's length, independent of the number of
        workers. Those with gaps take a look-up for each unit that they do not have.
        """
        units = memoryview(hashes).cast("Q")
        holders = self._holders
        groups: list[tuple[int, int]] = []
        pending = [(0, len(units) // _WORDS, self._everyone ^ self._with_gaps)]
        while pending:
            low, high, among = pending.pop()
            if low == high:
                if low:
                    groups.append((low, among))
                continue
            middle = (low + high + 1) // 2
            here = holders.get(units[_WORDS * (middle - 1)], 0) & among
            if here != among:
                pending.append((low, middle - 1, among ^ here))
            if here:
                pending.append((middle, high, here))
        if (among := self._with_gaps) != 0:
            found = dict(groups)
            for count in range(len(units) // _WORDS, 0, -1):
                if here := holders.get(units[_WORDS * (count - 1)], 0) & among:
                    found[count] = found.get(count, 0) | here
                    among ^= here
                    if not among:
                        break
            groups = sorted(found.items(), reverse=True)
        return Overlap(tuple(groups))

    def check(self) -> None:
        """Raises InvariantBroken when the data structures are inconsistent. For tests."""
        expected: dict[int, int] = {}
        for holding in self._holdings.values():
            if len(holding.units) > self._share:
                raise InvariantBroken(f"worker with bit {holding.bit:b} has more than its share")
            for unit in holding.units:
                expected[unit] = expected.get(unit, 0) | holding.bit
        if expected != self._holders:
            raise InvariantBroken("what units are held by differs from what workers hold")
        if self._entries != sum(len(holding.units) for holding in self._holdings.values()):
            raise InvariantBroken("entries are miscounted")

    def _add(self, holding: _Holding, units: Iterable[int]) -> None:
        held, holders, bit = holding.units, self._holders, holding.bit
        room = self._share - len(held)
        for unit in units:
            if room <= 0:
                break
            if unit not in held:
                held[unit] = None
                known = holders.get(unit)
                # Units that only this worker holds share one int object.
                holders[unit] = bit if known is None else known | bit
                room -= 1
                self._entries += 1

    def _let_go(self, holding: _Holding, unit: int) -> None:
        left = self._holders[unit] ^ holding.bit
        if left:
            self._holders[unit] = left
        else:
            del self._holders[unit]
        self._entries -= 1

    def _clear(self, holding: _Holding) -> None:
        for unit in holding.units:
            self._let_go(holding, unit)
        holding.units = {}

    def _share_out(self) -> None:
        before, workers = self._share, max(1, len(self._holdings))
        self._share = min(self._max_per_worker, max(1, self._max_entries // workers))
        if self._share < before:
            for holding in self._holdings.values():
                while len(holding.units) > self._share:
                    self._let_go(holding, holding.units.popitem()[0])


def _keys(hashes: bytes) -> list[int]:
    return memoryview(hashes).cast("Q")[::_WORDS].tolist()


def _bits(workers: int) -> Iterator[int]:
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
