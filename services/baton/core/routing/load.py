"""What a worker tells about itself: what it is, and how busy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from baton.core.routing.speed import UNMEASURED, WorkerSpeed


class WorkerState(Enum):
    """Where a worker stands in its life."""

    STARTING = 1
    """Not ready (yet, or again): it loads, or its own way for KV does not work."""
    SERVING = 2
    DRAINING = 3
    KV_ONLY = 4
    """Computes nothing more; KV still waits to be collected."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker is; the same for its whole instance id.

    model, layout, transports and the numbers are left out where a role has none. transports: best
    first. num_blocks: blocks of the pool. block_size: positions of a block. max_sequences: how many
    may own blocks at once, of a tokenizer: how many inputs it works on at once; 0: not known.
    standby: it is given work only while another is missing.
    """

    identity: WorkerIdentity
    model: ModelDescription | None = None
    layout: KvLayout | None = None
    transports: tuple[str, ...] = ()
    num_blocks: int = 0
    block_size: int = 0
    kv_bytes_per_position: int = 0
    exact: bool = False
    max_sequences: int = 0
    standby: bool = False


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant uses of a worker, through one or several routers.

    requests, tokens: that began here, and that were prefilled or sampled here for them, counted
    for as long as the worker remembers the tenant. held_requests, held_tokens: here now, and what
    they may come to.
    """

    tenant: str
    requests: int = 0
    tokens: int = 0
    held_requests: int = 0
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is.

    waiting_tokens: prompt tokens that wait to be computed. free_blocks: blocks that nobody uses,
    cached ones included. step_age_us and step_predicted_us: of the running step, 0 when idle.
    tenants: what they use through other routers than the one that is told.
    speed: by the worker's own measurements so far.
    """

    state: WorkerState
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    running_sequences: int = 0
    free_blocks: int = 0
    step_age_us: int = 0
    step_predicted_us: int = 0
    tenants: tuple[TenantUse, ...] = ()
    speed: WorkerSpeed = UNMEASURED
