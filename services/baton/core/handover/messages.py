"""What sender and receiver say to each other, as plain values.

These mirror `protos/baton/v1/handover.proto` one to one. KV bytes never travel in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.request.attempt import ChoiceTokens
from baton.core.request.model import KvLayout, WorkerIdentity

HANDOVER_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class StagingPoolDescription:
    """Staging memory that a peer may read.

    base_address: address of buffer 0 in its owner's memory. memory_kind: DRAM or VRAM.
    """

    base_address: int
    buffer_bytes: int
    num_buffers: int
    device_id: int = 0
    memory_kind: str = "DRAM"


@dataclass(frozen=True, slots=True)
class HandshakeRequest:
    """The receiver introduces itself. transports: what it can use, best first.

    kv_network, ucx_transports: what NIXL may use here; described, not compared.
    """

    receiver: WorkerIdentity
    layout: KvLayout
    transports: tuple[str, ...]
    sender_instance_id: str
    kv_network: str = ""
    ucx_transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Handshake:
    """The sender's answer: how the two will move KV chunks.

    transport_metadata: opaque bytes that the named transport needs to reach the sender's ring.
    digest: how KV chunks are sealed. kv_network, ucx_transports: what NIXL may use there.
    """

    sender: WorkerIdentity
    layout: KvLayout
    transport: str
    transport_metadata: bytes
    ring: StagingPoolDescription
    digest: str
    kv_network: str = ""
    ucx_transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KvChunkHeader:
    """What a KV chunk holds: ranges as first and count. digest covers the rest and the payload.

    instance id: the sender's. handover_id: 16 bytes. index: number of the KV chunk in the
    hand-over.
    """

    instance_id: str
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

    max_kv_chunk_bytes: what a landing buffer of the receiver holds, header included.
    probe_positions: 0, or a probe is wanted: so many positions of made-up KV. wire_version: the
    newest that both speak, of which the receiver heard when they met.
    """

    handover_id: bytes
    receiver: WorkerIdentity
    sender_instance_id: str
    max_kv_chunk_bytes: int
    probe_positions: int = 0
    wire_version: int = 1


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks are reserved; KV before from_position is in the receiver's prefix cache."""

    from_position: int


@dataclass(frozen=True, slots=True)
class Full:
    """No room for the sequence."""


@dataclass(frozen=True, slots=True)
class Credit:
    """This many more KV chunks may come: a landing buffer is held for each."""

    num_kv_chunks: int


@dataclass(frozen=True, slots=True)
class KvChunkCollected:
    """The KV chunk has landed and was verified; its buffer is the sender's again."""

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
class KvChunkReady:
    """A sealed KV chunk waits in the sender's buffer; the header in that buffer must equal this
    one."""

    header: KvChunkHeader
    buffer: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token 0 of every choice. The sender's last message."""

    choices: tuple[ChoiceTokens, ...]


ReceiverMessage = (
    OpenHandover | Granted | Full | Credit | KvChunkCollected | Failed | Completed | Heartbeat
)
SenderMessage = Announced | Finished | KvChunkReady | Tokens | Failed | Heartbeat
