"""WorkerSpeed, how fast a worker is by its own measurements.

The same numbers predict a prompt's time to first token, what it does to sequences that run, and
whether a hand-over is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.core.scheduler.step_cost import reads


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """Seconds, each for one of a thing; what was not measured yet is 0.

    step_s, row_s, context_s: a decode step, each sequence in it, each position that those read.
    prefill_step_s, prefill_position_s, prefill_read_s: a step's prefill, each position of it, each
    read as `PrefillCost` counts them. prefill_step_tokens: positions that a step prefills at most,
    0: any. link_bytes_per_s: of KV chunks that come in. handover_s: a hand-over's end after the
    prompt is computed, besides reading what is left.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    context_s: float = 0.0
    prefill_step_s: float = 0.0
    prefill_position_s: float = 0.0
    prefill_read_s: float = 0.0
    prefill_step_tokens: int = 0
    link_bytes_per_s: float = 0.0
    handover_s: float = 0.0

    @property
    def prefills(self) -> bool:
        """Whether prefilling was measured."""
        return (self.prefill_step_s or self.prefill_position_s or self.prefill_read_s) > 0.0

    @property
    def decodes(self) -> bool:
        return (self.step_s or self.row_s or self.context_s) > 0.0

    def or_else(self, other: WorkerSpeed) -> WorkerSpeed:
        """With another one's curves in place of those that were not measured here."""
        speed = self
        if not speed.prefills:
            speed = replace(
                speed,
                prefill_step_s=other.prefill_step_s,
                prefill_position_s=other.prefill_position_s,
                prefill_read_s=other.prefill_read_s,
            )
        return speed if speed.decodes else speed.with_decode_of(other)

    def with_decode_of(self, other: WorkerSpeed) -> WorkerSpeed:
        return replace(self, step_s=other.step_s, row_s=other.row_s, context_s=other.context_s)

    def prefill_steps(self, tokens: int) -> int:
        most = self.prefill_step_tokens
        return -(-tokens // most) if most else min(1, tokens)

    def prefill_s(self, first: int, end: int) -> float:
        """Computing the positions from `first` to before `end` of one prompt, alone."""
        return (
            self.prefill_steps(end - first) * self.prefill_step_s
            + (end - first) * self.prefill_position_s
            + reads(first, end) * self.prefill_read_s
        )

    def queue_s(self, tokens: int, prompts: int) -> float:
        """Computing all of a queue, taken as prompts of equal length."""
        if not tokens:
            return 0.0
        prompts = max(1, prompts)
        return (
            self.prefill_steps(tokens) * self.prefill_step_s
            + tokens * self.prefill_position_s
            + prompts * reads(0, tokens // prompts) * self.prefill_read_s
        )

    def decode_s(self, rows: float, context: float) -> float:
        """One step of so many sequences that read so many positions together."""
        return self.step_s + rows * self.row_s + context * self.context_s

    def handover_tail_s(self, num_bytes: int) -> float:
        """What is left of a hand-over when a last chunk of so many bytes is computed."""
        rate = self.link_bytes_per_s
        return self.handover_s + (num_bytes / rate if rate else 0.0)


UNMEASURED = WorkerSpeed()

NOMINAL = WorkerSpeed(prefill_position_s=1e-4, link_bytes_per_s=1e9)
"""Stands in while nobody of a role has measured anything: queues then count by their tokens, and KV
that would have to come by its bytes."""
