"""What is to be collected, what came of it, and what the collecting engine has to offer.

Values and call signatures only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from baton.core.errors import BatonError
from baton.core.handover.table import Limit, State
from baton.core.request.attempt import ChoiceTokens
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.transfer.buffers import StagingPool
from baton.transfer.faults import Faults
from baton.transfer.line import Liveness
from baton.transfer.stats import HandoverStats

Names = Mapping[str, str]
"""What names the request that a hand-over is for in log lines."""
NO_NAMES: Names = MappingProxyType({})

Reserve = Callable[[], Awaitable[int | None]]
"""reserve(): holds blocks for the whole input and answers from which position KV is needed, or None
when there is no room. May be cancelled; whatever it holds then is the caller's to free."""

Unpack = Callable[[int, int, memoryview], Awaitable[None]]
"""unpack(first_position, count, payload): copies verified KV into the reserved blocks. Called for
one KV chunk after the other, in position order. It is never cancelled; when it returns or raises,
it reads `payload` no more."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected. tokens: token 0 of every choice. cached_positions: KV we had already."""

    tokens: tuple[ChoiceTokens, ...]
    received_bytes: int
    cached_positions: int


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Names one hand-over to collect. num_positions: of the input. deadline_s: for all of it.

    is_probe: nobody offers it; the sender makes its KV up (`baton.transfer.probe`). about: see
    Names.
    """

    handover_id: bytes
    sender: WorkerIdentity
    num_positions: int
    deadline_s: float = 30.0
    is_probe: bool = False
    about: Names = field(default_factory=lambda: NO_NAMES, hash=False)


class ProbeOutcome(Enum):
    OK = "ok"
    LOST = "lost"
    """The peer did not answer, refused, or took too long."""
    UNREADABLE = "unreadable"
    """The read failed or hangs."""
    MISMATCH = "mismatch"
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What came of a probe. error: None only when all went well."""

    outcome: ProbeOutcome
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all hand-overs of one receiver share."""

    identity: WorkerIdentity
    layout: KvLayout
    ring: StagingPool
    liveness: Liveness
    limits: Mapping[State, Limit]
    stats: HandoverStats
    faults: Faults
