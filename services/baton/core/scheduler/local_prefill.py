"""LocalPrefill, which inputs a decode step computes and how much of them; knows no blocks.

They share the step with running sequences under a budget, which bounds the latter's inter-token
latency. At least one block is always computed, so nothing starves.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from baton.core.scheduler.launched import InputChunk
from baton.core.scheduler.plan import Chunk
from baton.core.scheduler.sequence import Sequence
from baton.core.scheduler.sequence_group import SequenceGroup
from baton.core.scheduler.sequence_table import SequenceTable
from baton.core.scheduler.step_cost import StepCost
from baton.core.scheduler.waiting import rank


class LocalPrefill:
    """alone, beside: positions of a step when nothing runs and when something does. target_step_s:
    the latter are cut so that the step's predicted seconds stay below it; 0: they are not.
    pipelined: inputs of which a chunk is in flight go on. Budgets are at least one block.
    """

    def __init__(
        self,
        roster: SequenceTable,
        cost: StepCost,
        *,
        block_size: int,
        alone: int,
        beside: int,
        target_step_s: float,
        pipelined: bool,
    ):
        self._roster = roster
        self._cost = cost
        self._block_size = block_size
        self._alone = alone
        self._beside = beside
        self._target_step_s = target_step_s
        self._pipelined = pipelined

    def budget(self, rows: Many[Sequence]) -> int:
        """Positions that may be computed in a step with these rows."""
        # One that waits to run on may join the step, too.
        if not self._roster.running and not self._roster.num_stored:
            return self._alone
        budget = self._beside
        if self._target_step_s:
            context = sum(sequence.reach for sequence in rows)
            most = self._cost.most_prefill(len(rows), context, self._target_step_s)
            if most is not None:
                budget = min(budget, max(most, self._block_size))
        return budget

    def left(self, rows: Many[Sequence]) -> int:
        """What the inputs that have begun leave of the budget; below 0 when it is too small."""
        begun = sum(s.remaining for s in self._roster.prefilling if self._goes_on(s))
        return self.budget(rows) - begun

    def plan(self, rows: Many[Sequence]) -> tuple[list[Chunk], list[InputChunk]]:
        """Chunks of inputs that have their blocks, the most important first, in the budget; one of
        an input that is scored at most."""
        chunks: list[Chunk] = []
        inputs: list[InputChunk] = []
        budget = self.budget(rows)
        may_score = True
        for shared in sorted(self._roster.prefilling, key=rank):
            if not self._goes_on(shared) or (shared.scores is not None and not may_score):
                continue
            if budget < min(shared.remaining, self._block_size):
                break
            chunk = shared.next_chunk(budget, self._block_size)
            chunks.append(chunk)
            may_score = may_score and chunk.scored is None
            inputs.append(InputChunk(shared, chunk.end_position, not shared.remaining))
            budget -= len(chunk.token_ids)
        return chunks, inputs

    def _goes_on(self, shared: SequenceGroup) -> bool:
        return not shared.must_wait and (self._pipelined or not shared.in_flight)
