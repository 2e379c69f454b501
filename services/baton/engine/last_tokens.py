"""The token that each sequence sampled last, on the model's device.

It fills in the tokens that a plan leaves open because their step still runs (`plan.PENDING`), so
that the host need not see a token before the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.core.errors import Internal
from baton.core.scheduler.plan import PENDING, StepPlan
from baton.engine.transfer import upload

CAPACITY = 16384


class LastTokens:
    """Holds the tokens of the `capacity` sequences that sampled most recently."""

    def __init__(self, device: torch.device, capacity: int = CAPACITY):
        self._tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        # Row of each sequence's token, in the order in which they sampled.
        self._rows: dict[int, int] = {}

    def store(self, sequence_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens: int64 [sequences], one each. What is below 0, no token, is kept as token 0."""
        rows = [self._row(sequence_id) for sequence_id in sequence_ids]
        if len(set(rows)) != len(rows):
            raise Internal("a step samples one sequence twice, or more sequences than are held")
        place = upload(rows, torch.int64, tokens.device)
        self._tokens.index_copy_(0, place, tokens.clamp_min(0))

    def fill(self, plan: StepPlan, token_ids: torch.Tensor) -> None:
        """Replaces what is pending in token_ids, int64 [T'], the plan's tokens in order first.

        Raises Internal for a sequence that has sampled nothing, or too long ago.
        """
        rows: list[int] = []
        sources: list[int] = []
        row = 0
        for chunk in plan.chunks:
            if chunk.token_ids[0] == PENDING:
                source = self._rows.get(chunk.sequence_id)
                if source is None:
                    raise Internal(f"sequence {chunk.sequence_id} has no token that is pending")
                rows.append(row)
                sources.append(source)
            row += len(chunk.token_ids)
        if rows:
            places = upload([rows, sources], torch.int64, token_ids.device)
            token_ids.index_copy_(0, places[0], self._tokens.index_select(0, places[1]))

    def _row(self, sequence_id: int) -> int:
        row = self._rows.pop(sequence_id, None)
        if row is None:
            row = len(self._rows)
            if row >= len(self._tokens):
                row = self._rows.pop(next(iter(self._rows)))
        self._rows[sequence_id] = row
        return row
