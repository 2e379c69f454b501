"""WorkerLedger, what a router has given to one worker, and when that worker is full.

A worker's report is a little old and tells of all routers' work. What this router has given to a
worker it knows exactly; what others have there is taken from the newest report, less what was this
router's when it came. So room that comes free here is used at once, not when the worker says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.routing.load import WorkerLoad

BATCHES = 2
"""What may wait at a worker, in steps' worth of prompt tokens: one more would only wait there
instead of here, where it is still in order."""


@dataclass(slots=True)
class WorkerLedger:
    """computing: prompt tokens this router gave it to compute, without an answer. kv: positions
    this router promised it, without a word that their KV is there. others_*: what other routers
    have there. load: the report that this is from.
    """

    computing: int = 0
    kv: int = 0
    others_waiting: int = 0
    others_sequences: int = 0
    load: WorkerLoad | None = None

    @property
    def is_empty(self) -> bool:
        return not self.computing and not self.kv

    def read(self, load: WorkerLoad | None, placed_sequences: int) -> None:
        """Takes the newest report, if it is new. placed_sequences: this router's, there now."""
        if load is not None and load is not self.load:
            self.load = load
            self.others_waiting = max(0, load.waiting_tokens - self.computing)
            here = load.waiting_sequences + load.running_sequences
            self.others_sequences = max(0, here - placed_sequences)

    def is_full(self, placed_sequences: int, max_sequences: int) -> bool:
        """Whether it should get nothing more now. max_sequences: that it can run, 0: any."""
        most = BATCHES * self.load.speed.prefill_step_tokens if self.load is not None else 0
        if most and self.computing + self.others_waiting >= most:
            return True
        return 0 < max_sequences <= placed_sequences + self.others_sequences

    def has_kv(self, placed_sequences: int, block_size: int, positions: int) -> bool:
        """Whether a decode worker has free blocks for so many positions more. One that runs nothing
        takes whatever it can take at all."""
        load = self.load
        if load is None or (not placed_sequences and not load.running_sequences):
            return True
        return positions <= load.free_blocks * max(1, block_size) - self.kv
