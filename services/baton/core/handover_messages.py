"""What giver and collector say to each other, as plain values; knows no protobuf and no transport.

These mirror `protos/baton/v1/handover.proto` one to one. KV bytes never travel in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.attempt import ChoiceTokens
from baton.core.errors import BatonError
from baton.core.model import KvLayout, WorkerIdentity

HANDOVER_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class RingDescription:
    """Staging memory that a peer may read.

    base_address: address of slot 0 in its owner's memory. memory_kind: DRAM or VRAM.
    """

    base_address: int
    slot_bytes: int
    num_slots: int
    device_id: int = 0
    memory_kind: str = "DRAM"


@dataclass(frozen=True, slots=True)
class Introduction:
    """The collector introduces itself. transports: what it can use, best first.

    kv_network, ucx_transports: what NIXL may use here; described, not compared.
    """

    collector: WorkerIdentity
    layout: KvLayout
    transports: tuple[str, ...]
    giver_incarnation: str
    kv_network: str = ""
    ucx_transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The giver's answer: how the two will move parcels.

    transport_metadata: opaque bytes that the named transport needs to reach the giver's ring.
    digest: how parcels are sealed. kv_network, ucx_transports: what NIXL may use there.
    """

    giver: WorkerIdentity
    layout: KvLayout
    transport: str
    transport_metadata: bytes
    ring: RingDescription
    digest: str
    kv_network: str = ""
    ucx_transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParcelHeader:
    """What a parcel holds: ranges as first and count. digest covers the rest and the payload.

    incarnation: the giver's. handover_id: 16 bytes. index: number of the parcel in the hand-over.
    """

    incarnation: str
    handover_id: bytes
    index: int
    first_position: int
    num_positions: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    payload_bytes: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life from either side, sent when it was silent for a while."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Either side gives up."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class OpenHandover:
    """First message of the stream.

    max_parcel_bytes: what a landing slot of the collector holds, header included.
    probe_positions: 0, or a probe is wanted: so many positions of made-up KV. wire_version: the
    newest that both speak, of which the collector heard when they met.
    """

    handover_id: bytes
    collector: WorkerIdentity
    giver_incarnation: str
    max_parcel_bytes: int
    probe_positions: int = 0
    wire_version: int = 1


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks are reserved; KV before from_position is in the collector's prefix cache."""

    from_position: int


@dataclass(frozen=True, slots=True)
class Full:
    """No room for the sequence."""


@dataclass(frozen=True, slots=True)
class Credit:
    """This many more parcels may come: a landing slot is held for each."""

    num_parcels: int


@dataclass(frozen=True, slots=True)
class ParcelCollected:
    """The parcel has landed and was verified; its slot is the giver's again."""

    index: int


@dataclass(frozen=True, slots=True)
class Completed:
    """All KV and token 0 are in."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The first chunk is about to run. num_positions: positions of the input."""

    num_positions: int


@dataclass(frozen=True, slots=True)
class Finished:
    """KV of all positions below num_positions is computed."""

    num_positions: int


@dataclass(frozen=True, slots=True)
class ParcelReady:
    """A sealed parcel waits in the giver's slot; the header in that slot must equal this one."""

    header: ParcelHeader
    slot: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token 0 of every choice. The giver's last message."""

    choices: tuple[ChoiceTokens, ...]


CollectorMessage = (
    OpenHandover | Granted | Full | Credit | ParcelCollected | Failed | Completed | Heartbeat
)
GiverMessage = Announced | Finished | ParcelReady | Tokens | Failed | Heartbeat
