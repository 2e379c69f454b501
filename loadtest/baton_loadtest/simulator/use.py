"""Use, how busy one worker was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Use:
    """busy_s: in which a step ran. rows: sequences, once a decode step each. prefilled: positions.
    peak_blocks: most in use at the end of a step. block_s: blocks in use times seconds of steps."""

    busy_s: float = 0.0
    steps: int = 0
    rows: int = 0
    prefilled: int = 0
    peak_blocks: int = 0
    block_s: float = 0.0

    def ran(
        self, seconds: float, steps: int, rows: int, prefilled: int, before: int, after: int
    ) -> None:
        """Steps ran for so long together. before, after: blocks in use."""
        self.busy_s += seconds
        self.steps += steps
        self.rows += rows
        self.prefilled += prefilled
        self.peak_blocks = max(self.peak_blocks, after)
        self.block_s += seconds * (before + after) / 2
