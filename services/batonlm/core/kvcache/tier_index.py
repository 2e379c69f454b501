"""TierIndex: which units a tier behind the prefix cache keeps, and which go when it is full.

Comes in: units as they are stored, and each use of one. Goes out: the units to delete, so that what
is kept stays below a number of bytes. A unit goes only when no unit behind it is kept, because KV
is found from the start of its prefix. Of those, the one goes whose loss costs least: what nobody
used for long first; longer after its last use, the more often it was used and the deeper it lies in
its prefix, where a position reads more and takes longer to compute (a clock that is set on by every
eviction: GreedyDual-Size-Frequency, Cherkasova 1998, with equal sizes).

While several tenants keep units in a tier, none of them keeps more than half of its bytes: what
goes then is the tenant's own. Tenants are told apart by the namespaces of their units, which
different adapters have, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from batonlm.core.kvcache.block_pool import InvariantBroken
from batonlm.core.kvcache.cache_events import CachedUnits, Change, OnChange, units_in
from batonlm.core.kvcache.prefix import UNIT_TOKENS, PrefixLink, UnitName

MAX_UNITS = 1 << 18
"""Sixteen million tokens; what a unit is known by takes about 700 bytes."""

_TWICE_AS_DEAR = 8192
"""A position at this depth takes about twice as long to compute as a first one."""

_TENANT_SHARE = 2


def ignore(change: Change) -> None:
    """An OnChange for whoever reports to nobody."""


@dataclass(slots=True, eq=False)
class _Entry:
    name: UnitName
    num_bytes: int
    number: int
    """Of the last use, among all."""
    hits: int = 0
    worth: float = 0.0


_Pushed = tuple[float, int, _Entry]
"""Worth and number of an entry when it was pushed, and the entry."""


@dataclass(slots=True)
class _Tenant:
    num_bytes: int = 0
    num_units: int = 0
    leaves: list[_Pushed] = field(default_factory=list)
    """As `TierIndex._leaves`, of its own units."""


class TierIndex:
    """What one tier keeps. The owner deletes what `add` returns."""

    def __init__(
        self,
        max_bytes: int,
        max_units: int = MAX_UNITS,
        report: OnChange = ignore,
    ) -> None:
        """report: called with every unit that can be found from the start of its prefix from now
        on, or cannot any more."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._max_units = max_units
        self._entries: dict[bytes, _Entry] = {}
        self._behind: Counter[bytes] = Counter()
        """How many kept units follow a unit, whether it is kept or not."""
        self._of_tenant: dict[bytes, _Tenant] = {}
        """By namespace. Clients choose namespaces, so there may be as many as units."""
        self._largest: _Tenant | None = None
        """The last one that got more than its share."""
        self._leaves: list[_Pushed] = []
        """A heap of the units that may go. May have more: see `_cheapest`."""
        self._clock = 0.0
        self._number = 0
        self._found = CachedUnits(report)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[UnitName]:
        return (entry.name for entry in self._entries.values())

    def __contains__(self, unit: bytes) -> bool:
        return unit in self._entries

    def add(self, name: UnitName, num_bytes: int) -> list[UnitName]:
        """A unit that is not kept yet is stored. Returns those that go for it, which may be the
        unit itself."""
        entry = _Entry(name, num_bytes, 0)
        self._entries[name.unit] = entry
        self._behind[name.parent] += 1
        self._of_tenant.setdefault(name.namespace, _Tenant()).num_units += 1
        self._count(name.namespace, num_bytes)
        self._found.add(_link(name))
        self._value(entry)
        gone = []
        while self.num_bytes > self.max_bytes or len(self._entries) > self._max_units:
            gone.append(self._evict())
        return gone

    def use(self, unit: bytes) -> None:
        """A unit was of use; nothing when it is not kept."""
        if (entry := self._entries.get(unit)) is not None:
            entry.hits += 1
            self._value(entry)

    def remove(self, unit: bytes) -> None:
        """A unit is gone; nothing when it is not kept."""
        if (entry := self._entries.pop(unit, None)) is None:
            return
        name = entry.name
        self._found.remove(_link(name))
        self._of_tenant[name.namespace].num_units -= 1
        self._count(name.namespace, -entry.num_bytes)
        self._behind[name.parent] -= 1
        if not self._behind[name.parent]:
            del self._behind[name.parent]
            if (before := self._entries.get(name.parent)) is not None:
                self._push(before)

    def check(self) -> None:
        """Raises InvariantBroken when the books disagree. Costs time per unit."""
        entries = self._entries.values()
        by_tenant: Counter[bytes] = Counter()
        for entry in entries:
            by_tenant[entry.name.namespace] += entry.num_bytes
        counted = {namespace: tenant.num_bytes for namespace, tenant in self._of_tenant.items()}
        if by_tenant != counted or sum(by_tenant.values()) != self.num_bytes:
            raise InvariantBroken("a tier's bytes are miscounted")
        if Counter(entry.name.namespace for entry in entries) != {
            namespace: tenant.num_units for namespace, tenant in self._of_tenant.items()
        }:
            raise InvariantBroken("a tier's units are miscounted")
        if Counter(entry.name.parent for entry in entries) != self._behind:
            raise InvariantBroken("units behind others are miscounted")
        if self._found.present != units_in(_link(entry.name) for entry in entries):
            raise InvariantBroken("the units reported are not those that can be found")
        if self.num_bytes > self.max_bytes or len(self._entries) > self._max_units:
            raise InvariantBroken("a tier keeps more than it may")
        of_tenants = {entry for one in self._of_tenant.values() for *_, entry in one.leaves}
        for pushed in (of_tenants, {entry for *_, entry in self._leaves}):
            if not {entry for entry in entries if not self._behind[entry.name.unit]} <= pushed:
                raise InvariantBroken("a unit that may go is not found")

    def _value(self, entry: _Entry) -> None:
        self._number += 1
        entry.number = self._number
        depth = 1.0 + entry.name.first_position / _TWICE_AS_DEAR
        entry.worth = self._clock + (1 + entry.hits) * depth
        self._push(entry)

    def _push(self, entry: _Entry) -> None:
        """Unless it has units behind it, which have to go first."""
        if self._behind[entry.name.unit]:
            return
        tenant = self._of_tenant[entry.name.namespace]
        for heap, most in (
            (self._leaves, len(self._entries)),
            (tenant.leaves, tenant.num_units),
        ):
            heappush(heap, (entry.worth, entry.number, entry))
            if len(heap) > 64 + 4 * most:
                heap[:] = {each[1]: each for each in heap if self._may_go(each)}.values()
                heapify(heap)

    def _may_go(self, pushed: _Pushed) -> bool:
        """Whether what was pushed once is still so."""
        _, number, entry = pushed
        unit = entry.name.unit
        current = self._entries.get(unit) is entry and number == entry.number
        return current and not self._behind[unit]

    def _cheapest(self, heap: list[_Pushed]) -> _Entry | None:
        while heap:
            if self._may_go(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def _evict(self) -> UnitName:
        largest, heap = self._largest, self._leaves
        if largest is not None and len(self._of_tenant) > 1 and self._has_too_much(largest):
            heap = largest.leaves
        # Names that were read from a folder may form a ring, where none is last.
        entry = self._cheapest(heap) or next(iter(self._entries.values()))
        self._clock = max(self._clock, entry.worth)
        self.remove(entry.name.unit)
        return entry.name

    def _count(self, namespace: bytes, num_bytes: int) -> None:
        tenant = self._of_tenant[namespace]
        self.num_bytes += num_bytes
        tenant.num_bytes += num_bytes
        if not tenant.num_units:
            del self._of_tenant[namespace]
        elif self._has_too_much(tenant):
            # No other one has: all together have one unit too much at most.
            self._largest = tenant

    def _has_too_much(self, tenant: _Tenant) -> bool:
        return tenant.num_bytes * _TENANT_SHARE > self.max_bytes


def _link(name: UnitName) -> PrefixLink:
    """A unit as one block of its chain, which stays within its namespace."""
    digest, parent = name.namespace + name.unit, name.namespace + name.parent
    return PrefixLink(digest, parent, b"", name.first_position // UNIT_TOKENS, (name.unit,))
