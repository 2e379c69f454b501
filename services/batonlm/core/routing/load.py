"""A worker as routers see it: its speed, its description, its load, and the work that a router
placed on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from batonlm.core.request.model import (
    AdapterDescription,
    KvLayout,
    ModelDescription,
    WorkerIdentity,
)

NEAR = 512
"""Positions that each position attends to at no extra cost, because they are part of its own cost.
"""


def reads(first: int, end: int) -> int:
    """Counts the reads of positions from `first` to before `end`, beyond NEAR each. Position n
    attends to n + 1 positions."""
    far, from_far = max(0, end - NEAR), max(0, first - NEAR)
    return (far * (far + 1) - from_far * (from_far + 1)) // 2


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The speed of a worker by its own measurements; 0 for what was not measured yet.

    The same numbers predict a prompt's time to first token, its effect on running sequences, and
    whether a hand-over pays off.
    """

    step_s: float = 0.0
    """Seconds of a decode step."""
    row_s: float = 0.0
    """Additional seconds per sequence in a decode step."""
    context_s: float = 0.0
    """Additional seconds per position that those sequences read."""
    prefill_step_s: float = 0.0
    """Seconds of the prefill part of a step."""
    prefill_position_s: float = 0.0
    """Additional seconds per prefilled position."""
    prefill_read_s: float = 0.0
    """Additional seconds per read, as `PrefillCost` counts reads."""
    prefill_step_tokens: int = 0
    """Most positions that a step prefills; 0: no limit."""
    link_bytes_per_s: float = 0.0
    """Bytes per second of received KV chunks."""
    handover_s: float = 0.0
    """Seconds of the end of a hand-over after the prompt is computed, besides the transfer of the
    rest."""

    host_bytes_per_s: float = 0.0
    """Bytes per second that come back from host memory behind the prefix cache."""
    disk_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0

    def tier_bytes_per_s(self, tier: str) -> float:
        """tier: one of TIERS."""
        measured: float = getattr(self, f"{tier}_bytes_per_s")
        return measured or NOMINAL_TIERS[tier]

    @property
    def prefills(self) -> bool:
        """Whether prefilling was measured."""
        return (self.prefill_step_s or self.prefill_position_s or self.prefill_read_s) > 0.0

    @property
    def decodes(self) -> bool:
        return (self.step_s or self.row_s or self.context_s) > 0.0

    def or_else(self, other: WorkerSpeed) -> WorkerSpeed:
        """Returns this speed with the other's values where this one has none."""
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
        """Returns the seconds to compute the positions from `first` to before `end` of one prompt
        alone."""
        return (
            self.prefill_steps(end - first) * self.prefill_step_s
            + (end - first) * self.prefill_position_s
            + reads(first, end) * self.prefill_read_s
        )

    def queue_s(self, tokens: int, prompts: int) -> float:
        """Returns the seconds to compute a whole queue, taken as prompts of equal length."""
        if not tokens:
            return 0.0
        prompts = max(1, prompts)
        return (
            self.prefill_steps(tokens) * self.prefill_step_s
            + tokens * self.prefill_position_s
            + prompts * reads(0, tokens // prompts) * self.prefill_read_s
        )

    def decode_s(self, rows: float, context: float) -> float:
        """Returns the seconds of one step with this many sequences that read this many positions
        together."""
        return self.step_s + rows * self.row_s + context * self.context_s

    def handover_tail_s(self, num_bytes: int) -> float:
        """Returns the seconds that remain of a hand-over when its last chunk, of this many bytes,
        is computed."""
        rate = self.link_bytes_per_s
        return self.handover_s + (num_bytes / rate if rate else 0.0)


UNMEASURED = WorkerSpeed()

NOMINAL_TIERS = {"host": 4e9, "disk": 1e9, "store": 2e8}
"""Bytes per second of tiers that nobody has measured yet."""

NOMINAL = WorkerSpeed(prefill_position_s=1e-4, link_bytes_per_s=1e9)
"""The default while no worker of a role has measured its speed: queues then count by their tokens,
and missing KV by its bytes."""


class WorkerState(Enum):
    """What a worker can do now."""

    STARTING = 1
    """Not ready: it loads, or its KV transport does not work."""
    SERVING = 2
    DRAINING = 3
    KV_ONLY = 4
    """Computes nothing; KV still waits to be collected."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The constant properties of one instance id. A role leaves out fields that do not apply to
    it."""

    identity: WorkerIdentity
    model: ModelDescription | None = None
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    """Best first."""
    num_blocks: int = 0
    """Of the block pool."""
    block_size: int = 0
    """Positions per block."""
    kv_bytes_per_position: int = 0
    exact: bool = False
    """Whether it runs in exact mode."""
    max_sequences: int = 0
    """Most sequences that may own blocks at once; for a tokenizer, most inputs that it processes at
    once; 0: unknown."""
    standby: bool = False
    """Whether it gets work only while another worker is missing."""

    @property
    def state_positions(self) -> int:
        """Positions more that a hand-over moves, for the sequence's state."""
        return 0 if self.layout is None else self.layout.state_positions

    @property
    def state_room(self) -> int:
        """Positions of the pool that a sequence's state takes."""
        if self.layout is None or not self.layout.state_positions:
            return 0
        return self.layout.state_blocks(self.block_size) * self.block_size

    def positions_taken(self, input_tokens: int, choices: int) -> int:
        """Positions of the pool that an attempt takes at first: of its input, the first token of
        every choice, and every choice's state."""
        return input_tokens + choices * (1 + self.state_room)


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The LoRA adapters of a worker, one a name."""

    version: int = 0
    """Grows with every change of the list."""
    adapters: tuple[AdapterDescription, ...] = ()
    loads_on_use: bool = False
    """Whether the worker loads what requests name from its folder."""


NO_ADAPTERS = AdapterList()


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant uses of a worker, through one or several routers."""

    tenant: str
    requests: int = 0
    """Requests that started here, for as long as the worker keeps the tenant."""
    tokens: int = 0
    """Tokens that were prefilled or sampled here, for as long as the worker keeps the tenant."""
    held_requests: int = 0
    """Requests that run here now."""
    held_tokens: int = 0
    """The most tokens that these may reach."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker."""

    state: WorkerState
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that wait to be computed."""
    running_sequences: int = 0
    free_blocks: int = 0
    """Blocks without an owner, including cached ones."""
    step_age_us: int = 0
    """Age of the running step; 0 when idle."""
    step_predicted_us: int = 0
    """The predicted duration of that step."""
    tenants: tuple[TenantUse, ...] = ()
    """The use through routers other than the recipient of this report."""
    speed: WorkerSpeed = UNMEASURED
    orphans: tuple[bytes, ...] = ()
    """The adoption ids of sequences whose routers are gone (`core.request.resumption`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot(WorkerDescription):
    """A worker at one moment, with what this router placed on it, because a report is always
    slightly old."""

    model: ModelDescription
    load: WorkerLoad
    number: int = -1
    """Its number in the prefix index; below 0: none."""
    tiers: tuple[tuple[str, int], ...] = ()
    """Its tiers, the fastest first, each with its number in the index of tiers."""
    since: float = 0.0
    """When it was first seen, on the clock of `decide`'s now."""
    placed_sequences: int = 0
    """Placed by this router and not finished."""
    placed_tokens: int = 0
    """Prompt tokens to prefill of the placed sequences."""
    fresh_sequences: int = 0
    """Placed after the newest report; a part of placed_sequences."""
    fresh_tokens: int = 0
    """Prompt tokens to prefill of the fresh sequences."""
    fresh_positions: int = 0
    """Positions that need blocks, of the fresh sequences."""
    adapters: frozenset[str] = frozenset()
    """The digests of its LoRA adapters."""
    used_adapters: Mapping[str, AdapterDescription] = field(default_factory=dict)
    """By name, those of its adapters that it loaded because requests named them."""
    loads_on_use: bool = False
    """Whether it loads such adapters."""

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
        fresh = self.fresh_positions + self.fresh_sequences * self.state_room
        return max(0, self.load.free_blocks * self.block_size - fresh)

    @property
    def used_positions(self) -> int:
        used = (self.num_blocks - self.load.free_blocks) * self.block_size
        return max(0, used - self.load.running_sequences * self.state_room)


BATCHES = 2
"""Most prompt tokens that may wait at a worker, in steps' worth. More would wait there in arrival
order instead of here in fair order."""


@dataclass(slots=True)
class WorkerLedger:
    """What a router has placed on one worker, and when that worker is full.

    A worker's report is slightly old and covers the work of all routers. This router knows exactly
    what it placed itself; the others' work is taken from the newest report, less this router's
    share at that time. So room that this router frees is used at once, before the worker reports
    it.
    """

    computing: int = 0
    """Prompt tokens that this router placed there and that are not answered."""
    kv: int = 0
    """Positions that this router reserved there and whose KV is not known to have arrived."""
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
        """Takes the newest report, if it is new. placed_sequences: this router's sequences there
        now."""
        if load is not None and load is not self.load:
            self.load = load
            self.others_waiting = max(0, load.waiting_tokens - self.computing)
            here = load.waiting_sequences + load.running_sequences
            self.others_sequences = max(0, here - placed_sequences)

    def is_full(self, placed_sequences: int, max_sequences: int) -> bool:
        """Whether the worker should get nothing more now. max_sequences: the most that it can run;
        0: no limit."""
        most = BATCHES * self.load.speed.prefill_step_tokens if self.load is not None else 0
        if most and self.computing + self.others_waiting >= most:
            return True
        return 0 < max_sequences <= placed_sequences + self.others_sequences

    def has_kv(self, placed_sequences: int, block_size: int, positions: int) -> bool:
        """Whether a decode worker has free blocks for this many more positions. An idle worker
        accepts anything that fits it at all."""
        load = self.load
        if load is None or (not placed_sequences and not load.running_sequences):
            return True
        return positions <= load.free_blocks * max(1, block_size) - self.kv
