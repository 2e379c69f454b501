"""DecodePolicy, how much a decode worker takes on at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.scheduler.scheduler import QueueLimit


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """max_sequences: how many own blocks at once. token_budget: positions of a step at most, one of
    them for each running sequence. prefill_budget: most of them for local prefill while sequences
    run. headroom: positions that all that is let in can grow. target_step_s: the strictest time
    between two tokens, in seconds: nothing is let in, and no chunk is longer, than lets a step's
    predicted time stay below it, but one sequence always runs and one block is always computed; 0:
    no limit. limit: what may wait to be computed.
    """

    max_sequences: int = 256
    token_budget: int = 2048
    prefill_budget: int = 256
    headroom: int = 64
    target_step_s: float = 0.0
    limit: QueueLimit = field(default_factory=QueueLimit)

    def prefill_beside(self, block_size: int) -> int:
        """Positions that a step may prefill beside sequences that run. Raises ValueError when that
        is less than a block."""
        beside = min(self.prefill_budget, self.token_budget - self.max_sequences)
        if beside < block_size:
            raise ValueError(
                "prefill_budget, and token_budget - max_sequences, must be at least one block, "
                "or local prefill can starve"
            )
        return beside
