"""What the hand-over explorer computes once: the states of one hand-over and of the rings as
numbers, and what can come of each by production's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from batonlm.core.handover.table import BufferEvent
from tests.core import handover_moves as one
from tests.core import handover_rings as shared
from tests.core.handover_numbers import Ids, Ints, Lists, T, Table
from tests.core.handover_parts import (
    Broken,
    BufferUse,
    Life,
    Local,
    Move,
    Mutation,
    begin,
    unfinished,
)
from tests.core.handover_rings import Rings
from tests.core.handover_symmetry import mirrored, renamed, renamed_rings, renamings

DEATHS = ("sender dies", "receiver dies")
FREEZES = ("sender freezes", "receiver freezes")
THAWS = ("sender thaws", "receiver thaws")

_RING_BITS = 10
_LIFE_BITS = 2
_BLOCKED = 0


class Size(NamedTuple):
    """What is explored: inputs of so many positions, and states of so many, each a KV chunk, rings
    of so many buffers."""

    num_positions: int = 3
    num_buffers: int = 2
    state_positions: int = 0
    is_prefix: bool = False
    """Whether the input is a prefix, of which the sender's cache has some or nothing."""


FULL_SIZE = Size()


class Moved(NamedTuple):
    """States after moves. which: of the states given, each came from."""

    which: Ints
    mine: Ints
    other: Ints
    rings: Ints


class Known:
    """All states of hand-overs and rings that were met. Tables raise Broken where no promise
    allows what they are asked for."""

    def __init__(self, mutation: Mutation | None = None, size: Size = FULL_SIZE):
        self.locals: Ids[Local] = Ids()
        self.rings: Ids[Rings] = Ids()
        self._uses: Ids[tuple[BufferUse, ...]] = Ids()
        self.begin = (
            self.locals[begin(size.num_positions, size.state_positions, is_prefix=size.is_prefix)],
            self.rings[shared.fresh(size.num_buffers)],
        )
        move = partial(one.moves, num_buffers=size.num_buffers, mutation=mutation)
        self._moves = {
            "freely": self._lists(partial(move, faults=False)),
            "by fault": self._lists(partial(move, faults=True)),
            "by deadline": self._lists(partial(one.expire, mutation=mutation)),
        }
        self._used = Table(self._use)
        buffers = range(size.num_buffers)
        self._overwritten = [
            _table(self.locals, partial(one.overwritten, buffer=buffer, mutation=mutation))
            for buffer in buffers
        ]
        self.filter_reason = {
            name: _table(self.locals, partial(one.filter_reason, name=name))
            for name in (*DEATHS, *FREEZES, *THAWS)
        }
        self.without = {
            name: _table(self.rings, partial(shared.without, name=name)) for name in DEATHS
        }
        self.settled = [
            _table(self.rings, partial(shared.settled, buffer=buffer)) for buffer in buffers
        ]
        self.mirrored = _table(self.rings, mirrored)
        self.renamed = [
            (
                _table(self.locals, partial(renamed, names=names)),
                _table(self.rings, partial(renamed_rings, names=names)),
            )
            for names in renamings(size.num_buffers)
        ]
        self.sender_life = _facts(self.locals, lambda local: local.sender_life.value)
        self.receiver_life = _facts(self.locals, lambda local: local.receiver_life.value)
        self.orphaned = _facts(self.rings, shared.orphaned)
        self.ends: Ids[tuple[str, str]] = Ids()
        self.end = _facts(self.locals, self._end)
        self._check_buffers = Table(self._check_leaks)

    def moves(self, kind: str, owner: int, mine: Ints, other: Ints, rings: Ints) -> Moved:
        """All moves of one kind that one of the hand-overs can make in these states."""
        which, (after, uses, filled) = self._moves[kind](mine)
        around = self._used((uses * 2 + owner) << _RING_BITS | rings[which])
        possible = around != _BLOCKED
        if not possible.all():
            which, after, around = which[possible], after[possible], around[possible]
            filled = filled[possible]
        other = other[which]
        for buffer, overwritten in enumerate(self._overwritten):
            hit = np.flatnonzero(filled == buffer)
            after[hit], other[hit] = overwritten(after[hit]), overwritten(other[hit])
        return Moved(which, after, other, around - 1)

    def check_buffers(self, locals_: Ints, rings: Ints) -> None:
        """Of states in which nothing can happen any more."""
        lives = self.sender_life(locals_) << _LIFE_BITS | self.receiver_life(locals_)
        self._check_buffers(rings << 2 * _LIFE_BITS | lives)

    def _check_leaks(self, packed: int) -> int:
        sender_life, receiver_life = divmod(packed & (1 << 2 * _LIFE_BITS) - 1, 1 << _LIFE_BITS)
        rings = self.rings.values_in_order[packed >> 2 * _LIFE_BITS]
        shared.check_leaks(
            rings,
            sender=sender_life == Life.ALIVE.value,
            receiver=receiver_life == Life.ALIVE.value,
        )
        return 0

    def _end(self, local: Local) -> int:
        """The number of how a hand-over ended to which nothing can happen any more."""
        if owed := unfinished(local):
            raise Broken(f"nothing can happen any more and {owed}")
        return self.ends[local.sender[1].value, local.receiver[2].value]

    def _lists(self, moves: Callable[[Local], Iterable[Move]]) -> Lists:
        def rows(local: int) -> Iterator[tuple[int, int, int]]:
            for after, uses in moves(self.locals.values_in_order[local]):
                taken = [
                    u.buffer for u in uses if u.ring == "sender" and u.event is BufferEvent.TAKE
                ]
                yield self.locals[after], self._uses[uses], taken[0] if taken else -1

        return Lists(rows, 3)

    def _use(self, packed: int) -> int:
        uses, owner = divmod(packed >> _RING_BITS, 2)
        rings = self.rings.values_in_order[packed & (1 << _RING_BITS) - 1]
        after = shared.used(rings, owner, self._uses.values_in_order[uses])
        if after is None:
            return _BLOCKED
        number = self.rings[after]
        assert number < 1 << _RING_BITS
        return number + 1


def _table(ids: Ids[T], function: Callable[[T], T]) -> Table:
    return Table(lambda number: ids[function(ids.values_in_order[number])])


def _facts(ids: Ids[T], function: Callable[[T], int]) -> Table:
    return Table(lambda number: function(ids.values_in_order[number]))
