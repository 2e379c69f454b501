"""Two hand-overs between one giver and one collector that share two rings of two slots, explored.

Every interleaving, breadth first, with at most so many faults a run. What one hand-over can do is
computed once for each of its states and what it finds in the rings, by production's own code. The
search itself handles numbers only, a whole generation of states at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.slot_states import SlotState
from tests.core import handover_moves as one
from tests.core import handover_rings as shared
from tests.core.handover_parts import (
    Broken,
    Life,
    Local,
    Mutation,
    Offers,
    SlotUse,
    begin,
    unfinished,
)
from tests.core.handover_rings import Rings

LIVES = ("giver dies", "collector dies", "giver freezes", "collector freezes")
THAWS = ("giver thaws", "collector thaws")
_BITS = 20
_MASK = (1 << _BITS) - 1

T = TypeVar("T")
Uses = tuple[SlotUse, ...]
Ints = npt.NDArray[np.int64]


class Ids(dict[T, int]):
    """Numbers for values, in the order in which they are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.values_in_order: list[T] = []

    def __missing__(self, value: T) -> int:
        self[value] = found = len(self.values_in_order)
        self.values_in_order.append(value)
        return found


class Moves:
    """What one of the two hand-overs can do, by its state and that of the rings."""

    def __init__(self, known: Known, owner: int, *, troubled: bool):
        self._known, self._owner, self._troubled = known, owner, troubled
        self._ids: dict[int, int] = {}
        self._starts = array("q", [0])
        self._locals, self._rings, self._faults = array("q"), array("q"), array("q")

    def of(self, local: Ints, rings: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Of every pair all that can come of it: (which pair, local, rings, 1 if by a fault)."""
        pairs, inverse = np.unique(local << _BITS | rings, return_inverse=True)
        ids = np.array([self._id(pair) for pair in pairs.tolist()], dtype=np.int64)[inverse]
        starts = _view(self._starts)
        counts = starts[ids + 1] - starts[ids]
        which = np.repeat(np.arange(len(local)), counts)
        first = np.cumsum(counts) - counts
        at = np.arange(len(which)) - first[which] + starts[ids][which]
        local, rings, faults = (
            _view(column)[at] for column in (self._locals, self._rings, self._faults)
        )
        return which, local, rings, faults

    def _id(self, pair: int) -> int:
        found = self._ids.get(pair)
        if found is None:
            found = self._ids[pair] = len(self._ids)
            self._find(pair >> _BITS, pair & _MASK)
        return found

    def _find(self, local: int, rings: int) -> None:
        known, owner = self._known, self._owner
        now, around = known.locals.values_in_order[local], known.rings.values_in_order[rings]
        offers = shared.offers(around, owner, now, troubled=self._troubled)
        for after, uses, fault in known.moves(local, offers):
            self._locals.append(after)
            self._rings.append(known.used(rings, owner, uses))
            self._faults.append(fault)
        self._starts.append(len(self._locals))


class Known:
    """All states of hand-overs and rings that were met, numbered."""

    def __init__(self, mutation: Mutation | None):
        self.mutation = mutation
        self.locals: Ids[Local] = Ids()
        self.rings: Ids[Rings] = Ids()
        self._tables: dict[str, array[int]] = {}
        self._moves: dict[tuple[int, Offers], list[tuple[int, Uses, int]]] = {}
        self._used: dict[tuple[int, int, Uses], int] = {}

    def moves(self, local: int, offers: Offers) -> list[tuple[int, Uses, int]]:
        """(state after it, what it does to slots, 1 if by a fault) of every move."""
        key = local, offers
        if key not in self._moves:
            now = self.locals.values_in_order[local]
            self._moves[key] = [
                (self.locals[move.after], move.uses, int(move.fault))
                for move in one.moves(now, offers, self.mutation)
            ]
        return self._moves[key]

    def used(self, rings: int, owner: int, uses: Uses) -> int:
        if not uses:
            return rings
        key = rings, owner, uses
        if key not in self._used:
            self._used[key] = self.rings[
                shared.used(self.rings.values_in_order[rings], owner, uses)
            ]
        return self._used[key]

    def mapped(self, name: str, ids: Ints, function: Callable[[int], int]) -> Ints:
        """function(id) of every id, each computed once."""
        table = self._tables.setdefault(name, array("q"))
        if not len(ids):
            return ids
        table.extend([-1] * (int(ids.max()) + 1 - len(table)))
        found = _view(table)[ids]
        missing = found < 0
        if missing.any():
            for each in np.unique(ids[missing]).tolist():
                table[each] = function(each)
            found[missing] = _view(table)[ids[missing]]
        return found

    def fate(self, name: str, locals_: Ints) -> Ints:
        def become(local: int) -> int:
            return self.locals[one.fate(self.locals.values_in_order[local], name)]

        return self.mapped(name, locals_, become)

    def without(self, name: str, rings: Ints) -> Ints:
        def become(each: int) -> int:
            return self.rings[shared.without(self.rings.values_in_order[each], name)]

        return self.mapped(f"without: {name}", rings, become)

    def mirrored(self, rings: Ints) -> Ints:
        return self.mapped(
            "mirrored",
            rings,
            lambda each: self.rings[shared.mirrored(self.rings.values_in_order[each])],
        )

    def lives(self, locals_: Ints) -> tuple[Ints, Ints]:
        """Of giver and collector, as numbers of Life."""
        values = self.locals.values_in_order
        return (
            self.mapped("giver", locals_, lambda local: values[local].giver_life.value),
            self.mapped("collector", locals_, lambda local: values[local].collector_life.value),
        )

    def in_limbo(self, rings: Ints) -> Ints:
        values = self.rings.values_in_order
        return self.mapped(
            "in limbo",
            rings,
            lambda each: sum(s.state is SlotState.LIMBO for s in values[each].collector),
        )


class Explorer:
    """max_faults: of one run. mutation: what is wrong with the protocol.

    rests: how pairs of hand-overs came to rest, each as the states of its two sides.
    """

    def __init__(self, max_faults: int = 2, mutation: Mutation | None = None):
        self.states = self.transitions = 0
        self.rests: set[frozenset[tuple[str, str]]] = set()
        self._max_faults = max_faults
        self._known = Known(mutation)
        self._faults = 0
        self._moves = [
            (Moves(self._known, 0, troubled=troubled), Moves(self._known, 1, troubled=troubled))
            for troubled in (False, True)
        ]
        self._seen: list[Ints] = []

    def run(self) -> None:
        """Raises Broken when a promise does not hold in some state.

        First what is reached without a fault, then what takes one more, and so on: a state that was
        met before, with as many faults or fewer, has nothing new behind it.
        """
        first = self._known.locals[begin()]
        start = self._ordered(*_columns(first, first, self._known.rings[Rings()]))
        by_fault = [start]
        for faults in range(self._max_faults + 1):
            self._faults = faults
            frontier = self._new(by_fault)
            by_fault = []
            while len(frontier):
                self.states += len(frontier)
                after, faulty = self._after(*_unpacked(frontier))
                frontier = self._new(after)
                by_fault += faulty

    def _after(self, first: Ints, second: Ints, rings: Ints) -> tuple[list[Ints], list[Ints]]:
        """All that can come of these states: without a fault, and by one."""
        known = self._known
        found: list[Ints] = []
        faulty: list[Ints] = []
        moved = np.zeros(len(first), dtype=bool)
        for owner, moves in enumerate(self._moves[self._faults > 0]):
            which, local, around, fault = moves.of((first, second)[owner], rings)
            moved[which[fault == 0]] = True
            pair = (local, second[which]) if owner == 0 else (first[which], local)
            for kind, worlds in ((0, found), (1, faulty)):
                chosen = fault == kind
                worlds.append(self._ordered(pair[0][chosen], pair[1][chosen], around[chosen]))
        giver, collector = known.lives(first)
        well = (giver == Life.ALIVE.value) & (collector == Life.ALIVE.value)
        for name in LIVES:
            fates = known.fate(name, first[well]), known.fate(name, second[well])
            faulty.append(self._ordered(*fates, known.without(name, rings[well])))
        for name, life in zip(THAWS, (giver, collector), strict=True):
            cold = life == Life.FROZEN.value
            fates = known.fate(name, first[cold]), known.fate(name, second[cold])
            found.append(self._ordered(*fates, rings[cold]))
        limbo = known.in_limbo(rings) > 0
        found += self._late(first[limbo], second[limbo], rings[limbo])
        found += self._at_rest(first[~moved], second[~moved], rings[~moved])
        if self._faults == self._max_faults:
            faulty = []
        self.transitions += sum(map(len, (*found, *faulty)))
        return found, [np.unique(np.concatenate(faulty))] if faulty else []

    def _late(self, first: Ints, second: Ints, rings: Ints) -> list[Ints]:
        """Transfers in limbo may end, or not."""
        known = self._known
        found = []
        for slot in range(shared.SLOTS):

            def settled(each: int, slot: int = slot) -> int:
                after = shared.later(known.rings.values_in_order[each])
                return known.rings[after[slot]] if slot < len(after) else each

            around = known.mapped(f"settled {slot}", rings, settled)
            found.append(self._ordered(first, second, around))
        return found

    def _at_rest(self, first: Ints, second: Ints, rings: Ints) -> list[Ints]:
        """Nothing can happen any more but what may never happen. Slots in limbo starve who waits
        for one, up to its deadline; otherwise all must be over."""
        found = []
        states = zip(*(column.tolist() for column in (first, second, rings)), strict=True)
        for one_state in states:
            late = self._deadlines(*one_state)
            if not late:
                self._check_rest(*one_state)
            found += late
        return found

    def _deadlines(self, first: int, second: int, rings: int) -> list[Ints]:
        known = self._known
        around = known.rings.values_in_order[rings]
        if all(slot.state is not SlotState.LIMBO for slot in around.collector):
            return []
        found = []
        for owner, local in enumerate((first, second)):
            for move in one.expire(known.locals.values_in_order[local], known.mutation):
                after = known.locals[move.after]
                used = known.rings[shared.used(around, owner, move.uses)]
                pair = (after, second) if owner == 0 else (first, after)
                found.append(self._ordered(*_columns(*pair, used)))
        return found

    def _check_rest(self, first: int, second: int, rings: int) -> None:
        values = self._known.locals.values_in_order
        pair = values[first], values[second]
        for local in pair:
            if owed := unfinished(local):
                raise Broken(f"nothing can happen any more and {owed}")
        found = self._known.rings.values_in_order[rings]
        given = {slot.state for slot in found.giver}
        if pair[0].giver_life is Life.ALIVE and given != {SlotState.FREE}:
            raise Broken("a slot of the giver has leaked")
        landed = {slot.state for slot in found.collector}
        if pair[0].collector_life is Life.ALIVE and landed - {SlotState.FREE, SlotState.LIMBO}:
            raise Broken("a slot of the collector has leaked")
        self.rests.add(
            frozenset((local.giver[1].value, local.collector[2].value) for local in pair)
        )

    def _ordered(self, first: Ints, second: Ints, rings: Ints) -> Ints:
        """Packed. The two hand-overs are alike: of a state and its mirror image one is explored."""
        swap = first > second
        around = rings.copy()
        around[swap] = self._known.mirrored(rings[swap])
        lesser, greater = np.minimum(first, second), np.maximum(first, second)
        return (lesser << _BITS | greater) << _BITS | around

    def _new(self, found: list[Ints]) -> Ints:
        """Those that were not seen yet, once each."""
        fresh = np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
        for seen in self._seen:
            if not len(fresh):
                return fresh
            at = np.searchsorted(seen, fresh)
            at[at == len(seen)] = 0
            fresh = fresh[seen[at] != fresh]
        if not len(fresh):
            return fresh
        self._seen.append(fresh)
        # Few and ever larger sorted runs, so that looking up stays cheap and merging does too.
        while len(self._seen) > 1 and len(self._seen[-2]) < 2 * len(self._seen[-1]):
            last = self._seen.pop()
            self._seen[-1] = np.sort(np.concatenate((self._seen[-1], last)), kind="stable")
        return fresh


def _view(numbers: array[int]) -> Ints:
    """Without a copy. While it lives the array cannot grow."""
    return np.frombuffer(numbers, dtype=np.int64)


def _columns(*values: int) -> tuple[Ints, Ints, Ints]:
    first, second, rings = (np.array([value], dtype=np.int64) for value in values)
    return first, second, rings


def _unpacked(packed: Ints) -> tuple[Ints, Ints, Ints]:
    pair = packed >> _BITS
    return pair >> _BITS, pair & _MASK, packed & _MASK
