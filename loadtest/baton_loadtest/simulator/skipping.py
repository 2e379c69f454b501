"""SkippingScheduler, core's decode scheduler that can take many quiet steps as one.

A step is quiet when all that it does is to make one more token for everybody who runs: nobody
joins, ends, waits or is prefilled, and there is a block for everyone who needs one. Of such steps
all that changes is counted here, in the order in which single steps would have done it, so that the
block pool is afterwards as it would have been. Everything else is core's.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from typing import cast

from baton.core.scheduler.sequence import Sequence
from baton.core.scheduler.sequence_table import rank
from baton_loadtest.simulator.intake import CountingScheduler, CountingSequence

_GROW, _PUBLISH = 0, 1


class SkippingScheduler(CountingScheduler):
    """Has no swap memory; a step is applied before the next one is planned."""

    @property
    def rows(self) -> list[CountingSequence]:
        """Who runs, in order of joining."""
        return cast(list[CountingSequence], list(self.sequences.running.values()))

    @property
    def num_rows(self) -> int:
        return len(self.sequences.running)

    def quiet_steps(self) -> int:
        """How many steps from now on are quiet, if nothing is called meanwhile."""
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
        """Blocks that these need for so many quiet steps, beyond those that they have."""
        size = self._pool.block_size
        grown = 0
        for one in rows:
            short = one.num_computed_tokens + steps - one.room
            if short > 0:
                grown += -(-short // size)
        return grown

    def skip(self, rows: Many[CountingSequence], steps: int, *, begun: bool) -> None:
        """Quiet steps of these rows are done. begun: one more is on its way, with its blocks."""
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
                one.settle(size)
        for one in rows:
            one.advance(steps)


def _when(
    due: tuple[int, int, tuple[int, int], CountingSequence],
) -> tuple[int, int, tuple[int, int]]:
    return due[:3]
