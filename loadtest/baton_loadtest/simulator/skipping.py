"""Many quiet steps of a decode scheduler as one, which is why a simulation is fast."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from typing import cast

from baton_loadtest.simulator.prompts import CountingScheduler, CountingSequence
from batonlm.core.scheduler.sequence import Sequence
from batonlm.core.scheduler.sequence_table import rank

_GROW, _PUBLISH = 0, 1


class SkippingScheduler(CountingScheduler):
    """Core's decode scheduler, which can take many quiet steps at once.

    A step is quiet if it only makes one more token for every running sequence: none joins, ends,
    waits or is prefilled, and there is a block for each sequence that needs one. The changes are
    applied in the order of single steps, so that the block pool has the same state afterwards.
    There is no swap memory, and a step is applied before the next one is planned.
    """

    @property
    def rows(self) -> list[CountingSequence]:
        """Returns the running sequences in order of joining."""
        return cast(list[CountingSequence], list(self.sequences.running.values()))

    @property
    def num_rows(self) -> int:
        return len(self.sequences.running)

    def quiet_steps(self) -> int:
        """Returns how many of the next steps are quiet, if nothing is called meanwhile."""
        sequences = self.sequences
        if sequences.waiting or sequences.prefilling or self._launched or not sequences.running:
            return 0
        rows = sequences.running.values()
        most = min(one.ceiling - one.num_computed_tokens for one in rows) - 1
        if most < 1:
            return 0
        free = self._pool.num_free
        if self.blocks_grown(rows, most) <= free:
            return most
        enough, too_many = 0, most
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self.blocks_grown(rows, middle) <= free:
                enough = middle
            else:
                too_many = middle
        return enough

    def blocks_grown(self, rows: Collection[Sequence], steps: int) -> int:
        """Returns the additional blocks that these sequences need for so many quiet steps."""
        size = self._pool.block_size
        grown = 0
        for one in rows:
            short = one.num_computed_tokens + steps - one.room
            if short > 0:
                grown += -(-short // size)
        return grown

    def skip(self, rows: Many[CountingSequence], steps: int, *, begun: bool) -> None:
        """Applies quiet steps of these rows. begun: another one has begun and has its blocks."""
        pool, size = self._pool, self._pool.block_size
        due: list[tuple[int, int, tuple[int, int], CountingSequence]] = []
        planned = steps + begun
        for one in rows:
            reach = one.num_computed_tokens
            for step in range(one.room - reach, planned, size):
                due.append((step, _GROW, rank(one), one))
            for step in range(-(reach + 1) % size, steps, size):
                due.append((step, _PUBLISH, rank(one), one))
        if due:
            due.sort(key=_when)
        for step, what, _, one in due:
            if what == _PUBLISH:
                one.publish(pool, one.num_computed_tokens + step + 1)
            elif one.table is None or not pool.grow(one.table):
                raise AssertionError("a step was not quiet")
            else:
                one.settle(pool)
        for one in rows:
            one.advance(steps)


def _when(
    due: tuple[int, int, tuple[int, int], CountingSequence],
) -> tuple[int, int, tuple[int, int]]:
    return due[:3]
