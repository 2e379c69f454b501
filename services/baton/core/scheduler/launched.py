"""Launched, what a step in flight will make and for whom."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from baton.core.scheduler.plan import SampledToken, StepResult
from baton.core.scheduler.sequence import Sequence, SequenceGroup


class InputChunk(NamedTuple):
    """Part of an input. end: the position up to which it is computed; last: that is all of it."""

    input: SequenceGroup
    end: int
    last: bool


class Launched(NamedTuple):
    """rows: whose tokens come, in this order. fetched: ids of sequences whose KV it moved back in
    from swap memory."""

    step: int
    rows: list[Sequence]
    inputs: list[InputChunk]
    fetched: frozenset[int]

    def drawn(self, result: StepResult) -> Many[SampledToken | None]:
        """A token for each row, or None."""
        if len(result.tokens) == len(self.rows):
            return result.tokens
        given = {token.sequence_id: token for token in result.tokens}
        return [given.get(sequence.id) for sequence in self.rows]
