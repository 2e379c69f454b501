"""Two hand-overs between one sender and one receiver that share two rings of buffers, explored.

Every interleaving, breadth first, with at most so many faults a run. What one hand-over can do is
computed once for each of its states, by production's own code; the search handles numbers only,
many thousand states at a time. States that differ in names alone count as one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.core.handover_known import DEATHS, FREEZES, THAWS, Known
from tests.core.handover_numbers import Ints, Seen, distinct
from tests.core.handover_parts import Life

_BITS = 20
_MASK = (1 << _BITS) - 1
_AT_ONCE = 1 << 17


class Explorer:
    """max_faults: of one run. symmetric: of states that differ in names alone one is explored.

    transitions: out of all states, faults too. ends: of two hand-overs that came to rest, each as
    the states of its two sides.
    """

    def __init__(self, known: Known, max_faults: int, *, symmetric: bool = True):
        self.states = self.transitions = 0
        self.ends: set[frozenset[tuple[str, str]]] = set()
        self._max_faults = max_faults
        self._symmetric = symmetric
        self._known = known
        self._seen = Seen()

    def run(self) -> None:
        """Raises Broken when a promise does not hold in some state.

        First what is reached without a fault, then what takes one more, and so on: a state that was
        met before, with as many faults or fewer, has nothing new behind it.
        """
        local, rings = (np.array([each]) for each in self._known.begin)
        by_fault = self._packed(local, local, rings)
        for faults in range(self._max_faults + 1):
            frontier = self._seen.add(by_fault)
            faulty = [frontier[:0]]
            while len(frontier):
                self.states += len(frontier)
                found = []
                for states in np.array_split(frontier, -(-len(frontier) // _AT_ONCE)):
                    unpacked = _unpacked(states)
                    found.append(self._all(self._freely(*unpacked)))
                    if faults < self._max_faults:
                        faulty.append(self._all(self._by_fault(*unpacked)))
                frontier = self._seen.add(distinct(*found))
            by_fault = distinct(*faulty)

    def reached(self) -> Ints:
        """All states, in order and each as the one that stands for those that differ in names."""
        return distinct(self._canonical(*_unpacked(self._seen.all())))

    def _all(self, found: Iterator[Ints]) -> Ints:
        arrays = list(found)
        self.transitions += sum(map(len, arrays))
        return distinct(*arrays)

    def _freely(self, first: Ints, second: Ints, rings: Ints) -> Iterator[Ints]:
        """All that can come of these states without a fault."""
        known = self._known
        rests = np.ones(len(first), dtype=bool)
        for which, after in self._moves("freely", first, second, rings):
            rests[which] = False
            yield after
        for name, life in zip(THAWS, (known.sender_life, known.receiver_life), strict=True):
            cold = np.flatnonzero(life(first) == Life.FROZEN.value)
            filter_reason = known.filter_reason[name]
            yield self._packed(filter_reason(first[cold]), filter_reason(second[cold]), rings[cold])
        for settled in known.settled:
            # A transfer orphaned may end, or not.
            after = settled(rings)
            ended = np.flatnonzero(after != rings)
            yield self._packed(first[ended], second[ended], after[ended])
        yield from self._at_rest(first[rests], second[rests], rings[rests])

    def _by_fault(self, first: Ints, second: Ints, rings: Ints) -> Iterator[Ints]:
        known = self._known
        for _, after in self._moves("by fault", first, second, rings):
            yield after
        lives = known.sender_life(first), known.receiver_life(first)
        for name, life in zip(DEATHS, lives, strict=True):
            at = np.flatnonzero(life != Life.DEAD.value)
            filter_reason, without = known.filter_reason[name], known.without[name]
            yield self._packed(
                filter_reason(first[at]), filter_reason(second[at]), without(rings[at])
            )
        for name, life in zip(FREEZES, lives, strict=True):
            at = np.flatnonzero(life == Life.ALIVE.value)
            filter_reason = known.filter_reason[name]
            yield self._packed(filter_reason(first[at]), filter_reason(second[at]), rings[at])

    def _moves(
        self, kind: str, first: Ints, second: Ints, rings: Ints
    ) -> Iterator[tuple[Ints, Ints]]:
        """(from which of these states, to which)."""
        which, mine, other, around = self._known.moves(kind, 0, first, second, rings)
        yield which, self._packed(mine, other, around)
        which, mine, other, around = self._known.moves(kind, 1, second, first, rings)
        yield which, self._packed(other, mine, around)

    def _at_rest(self, first: Ints, second: Ints, rings: Ints) -> Iterator[Ints]:
        """Nothing can happen any more but what may never happen. Buffers orphaned starve who waits
        for one, up to its deadline; otherwise all must be over."""
        known = self._known
        over = np.ones(len(first), dtype=bool)
        starved = np.flatnonzero(known.orphaned(rings))
        waiting = first[starved], second[starved], rings[starved]
        for which, after in self._moves("by deadline", *waiting):
            over[starved[which]] = False
            yield after
        self._check_over(first[over], second[over], rings[over])

    def _check_over(self, first: Ints, second: Ints, rings: Ints) -> None:
        known = self._known
        known.check_buffers(first, rings)
        ends = known.ends.values_in_order
        for pair in distinct(known.end(first) << _BITS | known.end(second)).tolist():
            self.ends.add(frozenset((ends[pair >> _BITS], ends[pair & _MASK])))

    def _packed(self, first: Ints, second: Ints, rings: Ints) -> Ints:
        if self._symmetric:
            return self._canonical(first, second, rings)
        return (first << _BITS | second) << _BITS | rings

    def _canonical(self, first: Ints, second: Ints, rings: Ints) -> Ints:
        """Packed, as the least of all that differ in names alone."""
        least = None
        for local, around in self._known.renamed:
            named = self._ordered(local(first), local(second), around(rings))
            least = named if least is None else np.minimum(least, named, out=least)
        assert least is not None
        return least

    def _ordered(self, first: Ints, second: Ints, rings: Ints) -> Ints:
        """Packed, the lesser hand-over first."""
        around = np.where(first > second, self._known.mirrored(rings), rings)
        lesser, greater = np.minimum(first, second), np.maximum(first, second)
        return (lesser << _BITS | greater) << _BITS | around


def _unpacked(packed: Ints) -> tuple[Ints, Ints, Ints]:
    pair = packed >> _BITS
    return pair >> _BITS, pair & _MASK, packed & _MASK
