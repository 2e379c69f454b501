"""A worker as routers see it: how fast it is, what it is, how busy, and what a router gave it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from baton.core.request.model import KvLayout, ModelDescription, WorkerIdentity

NEAR = 512
"""Positions that each position attends to at no extra cost: that is part of its own cost."""


def reads(first: int, end: int) -> int:
    """What positions from `first` up to before `end` attend to beyond NEAR others. Position n
    attends to n + 1."""
    far, from_far = max(0, end - NEAR), max(0, first - NEAR)
    return (far * (far + 1) - from_far * (from_far + 1)) // 2


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """How fast a worker is by its own measurements; what was not measured yet is 0.

    The same numbers predict a prompt's time to first token, what it does to sequences that run, and
    whether a hand-over is worth it.
    """

    step_s: float = 0.0
    """A decode step."""
    row_s: float = 0.0
    """Each sequence in a decode step."""
    context_s: float = 0.0
    """Each position that those sequences read."""
    prefill_step_s: float = 0.0
    """The prefill part of a step."""
    prefill_position_s: float = 0.0
    """Each position of it."""
    prefill_read_s: float = 0.0
    """Each read of it, as `PrefillCost` counts reads."""
    prefill_step_tokens: int = 0
    """Positions that a step prefills at most; 0: any."""
    link_bytes_per_s: float = 0.0
    """Of KV chunks that come in."""
    handover_s: float = 0.0
    """A hand-over's end after the prompt is computed, besides reading what is left."""

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


class WorkerState(Enum):
    """What a worker can do now."""

    STARTING = 1
    """Not ready (yet, or again): it loads, or its own way for KV does not work."""
    SERVING = 2
    DRAINING = 3
    KV_ONLY = 4
    """Computes nothing more; KV still waits to be collected."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker is; the same for its whole instance id. A role leaves out what it has not."""

    identity: WorkerIdentity
    model: ModelDescription | None = None
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    """Best first."""
    num_blocks: int = 0
    """Of the pool."""
    block_size: int = 0
    """Positions of a block."""
    kv_bytes_per_position: int = 0
    exact: bool = False
    """It runs in exact mode."""
    max_sequences: int = 0
    """Sequences that may own blocks at once; of a tokenizer: inputs that it works on at once; 0:
    not known."""
    standby: bool = False
    """It gets work only while another is missing."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant uses of a worker, through one or several routers."""

    tenant: str
    requests: int = 0
    """That began here, for as long as the worker remembers the tenant."""
    tokens: int = 0
    """That were prefilled or sampled here, likewise."""
    held_requests: int = 0
    """That are here now."""
    held_tokens: int = 0
    """What these may come to."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is."""

    state: WorkerState
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that wait to be computed."""
    running_sequences: int = 0
    free_blocks: int = 0
    """Blocks without an owner, cached ones included."""
    step_age_us: int = 0
    """Of the running step; 0 when idle."""
    step_predicted_us: int = 0
    """How long that step was predicted to take."""
    tenants: tuple[TenantUse, ...] = ()
    """What they use through other routers than the one that gets this report."""
    speed: WorkerSpeed = UNMEASURED


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at one moment, with what a router has given it: a report is always a little old."""

    identity: WorkerIdentity
    model: ModelDescription
    load: WorkerLoad
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    block_size: int = 1
    num_blocks: int = 0
    kv_bytes_per_position: int = 0
    max_sequences: int = 0
    """As in WorkerDescription."""
    standby: bool = False
    """As in WorkerDescription."""
    number: int = -1
    """In the prefix index; below 0: it has no place there."""
    since: float = 0.0
    """When it was met, on the clock of `decide`'s now."""
    placed_sequences: int = 0
    """Given by this router and not done yet."""
    placed_tokens: int = 0
    """To prefill, likewise."""
    fresh_sequences: int = 0
    """Given after the newest report came; a part of the placed ones."""
    fresh_tokens: int = 0
    """To prefill, likewise."""
    fresh_positions: int = 0
    """That need blocks, likewise."""

    @property
    def num_sequences(self) -> int:
        load = self.load
        known = load.waiting_sequences + load.running_sequences + self.fresh_sequences
        return max(known, self.placed_sequences)

    @property
    def waiting_tokens(self) -> int:
        return max(self.load.waiting_tokens + self.fresh_tokens, self.placed_tokens)

    @property
    def free_positions(self) -> int:
        return max(0, self.load.free_blocks * self.block_size - self.fresh_positions)

    @property
    def used_positions(self) -> int:
        return max(0, self.num_blocks - self.load.free_blocks) * self.block_size


BATCHES = 2
"""What may wait at a worker, in steps' worth of prompt tokens: one more would only wait there
instead of here, where it is still in order."""


@dataclass(slots=True)
class WorkerLedger:
    """What a router has given to one worker, and when that worker is full.

    A worker's report is a little old and covers the work of all routers. What this router has given
    to a worker it knows exactly; what others have there is taken from the newest report, less what
    was this router's when it came. So room that comes free here is used at once, and not only when
    the worker reports it.
    """

    computing: int = 0
    """Prompt tokens that this router gave it to compute and that are not answered."""
    kv: int = 0
    """Positions that this router reserved there and whose KV is not known to have come."""
    others_waiting: int = 0
    """Prompt tokens of other routers that wait there."""
    others_sequences: int = 0
    """Sequences of other routers there."""
    load: WorkerLoad | None = None
    """The report that these are from."""

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
