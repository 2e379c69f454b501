"""A KV chunk's fixed binary form, its seal and its verification.

A KV chunk lies in a buffer as 128 bytes followed by the payload. Its header travels on the Collect
stream. With xxh3-128 the 128 bytes are the header as well; with poly61 they are zero and mean
nothing, because the header names the hand-over's id, from which all keys follow, and a buffer's
bytes travel where they may be read. The header is little-endian:

    magic 4s | wire version u16 | digest kind u16 | instance id 16s | hand-over 16s | index u32
    | first position u32 | positions u32 | first layer u32 | layers u32 | first head u32 | heads u32
    | layout 8s | payload bytes u64 | zeros | digest 16s (at byte 112)

`layout` is a digest of the KvLayout that both sides found equal when they met, so that bytes of
another model never verify. The digest covers bytes 0-111 and the payload. Its kinds:
- xxh3-128, seeded from the hand-over's id, which only the two sides and the router know: finds
  accidents (stale, swapped, torn, foreign KV chunks) at memory speed, in memory of the host and on
  a network that is trusted;
- poly61, BLAKE2b over the header and the payload's hashes of `batonlm.core.handover.leaf_hash`,
  both keyed with the same secret: also finds deliberate changes, and a GPU computes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import xxhash

from batonlm.core.errors import InvalidArgument
from batonlm.core.handover.leaf_hash import points_of
from batonlm.core.handover.table import KvChunkRange
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import KvPayload, StagingMemory, in_host
from batonlm.v1 import handover_pb2 as pb

HEADER_BYTES = 128
DIGEST_BYTES = 16
XXH3, POLY = "xxh3-128", "poly61"
DIGESTS = (XXH3, POLY)

Pack = Callable[[int, int, Any], Awaitable[None]]
"""pack(first_position, count, out): writes KV of these positions into `out` in the wire layout.

out: a KvPayload. (Any, because whoever packs knows which memory it is.)

It is never cancelled; when it returns or raises, it touches `out` no more.
"""

Unpack = Callable[[int, int, Any], Awaitable[None]]
"""unpack(first_position, count, payload): copies verified KV into the reserved blocks. Called for
one KV chunk after the other, in position order. It is never cancelled; when it returns or raises,
it reads `payload`, a KvPayload, no more."""

PROBE_S = 8.0
"""Longer than a read may take, so that a read that hangs is reported as one."""
PROBE_BYTES = 64 << 10

_MAGIC = b"BTNP"
_FIELDS = struct.Struct("<4sHH16s16sIIIIIII8sQ")
_SEALED_BYTES = HEADER_BYTES - DIGEST_BYTES


class Sealer:
    """Seals and verifies the KV chunks of one hand-over."""

    def __init__(
        self,
        handover_id: bytes,
        instance_id: str,
        layout: KvLayout,
        memory: StagingMemory,
        digest: str = XXH3,
        *,
        wire_version: int = 0,
    ) -> None:
        """handover_id: 16 bytes, the secret. instance_id: the sender's. memory: that buffers lie
        in, on this side. digest: one of DIGESTS. wire_version: which both sides speak; 0: the
        layout's newest."""
        if digest not in DIGESTS:
            raise ValueError(f"digest must be one of {', '.join(DIGESTS)}")
        self._handover_id, self._instance_id, self._memory = handover_id, instance_id, memory
        self._layout, self._fingerprint, self._digest = layout, layout_fingerprint(layout), digest
        self._wire_version = wire_version or layout.max_wire_version
        self._key = hashlib.blake2b(handover_id, digest_size=32, person=b"baton parcel").digest()
        self._seed = int.from_bytes(self._key[:8], "little")
        self._points = points_of(handover_id)

    def header(self, chunk: KvChunkRange) -> pb.KvChunkHeader:
        """The header of a KV chunk of this hand-over, all layers and heads, not sealed yet."""
        return pb.KvChunkHeader(
            instance_id=self._instance_id,
            handover_id=self._handover_id,
            index=chunk.index,
            first_position=chunk.first_position,
            num_positions=chunk.num_positions,
            first_layer=0,
            num_layers=self._layout.num_layers,
            first_head=0,
            num_heads=self._layout.num_kv_heads,
            payload_bytes=chunk.num_positions * self._layout.bytes_per_position,
        )

    def expects(self, header: pb.KvChunkHeader, chunk: KvChunkRange) -> bool:
        """Whether a header announces this KV chunk of this hand-over, whatever its digest is."""
        expected = self.header(chunk)
        expected.digest = header.digest
        # A newer sender may say more than this side understands.
        header.DiscardUnknownFields()
        return expected == header

    def is_slow(self, header: pb.KvChunkHeader) -> bool:
        """Whether a digest takes long enough (about half a millisecond) to leave the event loop."""
        if not self._memory.in_host:
            return True
        return header.payload_bytes > (4 << 20 if self._digest == XXH3 else 512 << 10)

    def seal(self, header: pb.KvChunkHeader, buffer: KvPayload) -> None:
        """Sets the digest of the header and of the payload that lies in `buffer`, and the bytes in
        front of the payload."""
        fields = self._sealed_fields(header)
        header.digest = self._digest_of(fields, header, buffer)
        if self._memory.in_host:
            # In a device's memory nothing but zeros was ever written there.
            in_front = fields + header.digest if self._digest == XXH3 else bytes(HEADER_BYTES)
            in_host(buffer)[:HEADER_BYTES] = in_front

    def mismatch(self, header: pb.KvChunkHeader, buffer: KvPayload) -> str:
        """What is wrong with the KV chunk in `buffer`, of which `header` is expected; "" when
        nothing.

        "header": another KV chunk lies there. "digest": its bytes are not those that were sealed,
        which with poly61 includes another KV chunk's.
        """
        fields = self._sealed_fields(header)
        if self._digest == XXH3:
            found = bytes(in_host(buffer)[:HEADER_BYTES])
            if not hmac.compare_digest(found, fields + header.digest):
                return "header"
        digest = self._digest_of(fields, header, buffer)
        return "" if hmac.compare_digest(digest, header.digest) else "digest"

    def _sealed_fields(self, header: pb.KvChunkHeader) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            self._wire_version,
            DIGESTS.index(self._digest),
            bytes.fromhex(header.instance_id),
            header.handover_id,
            header.index,
            header.first_position,
            header.num_positions,
            header.first_layer,
            header.num_layers,
            header.first_head,
            header.num_heads,
            self._fingerprint,
            header.payload_bytes,
        )
        return fields.ljust(_SEALED_BYTES, b"\0")

    def _digest_of(self, fields: bytes, header: pb.KvChunkHeader, buffer: KvPayload) -> bytes:
        payload = buffer[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        if self._digest == XXH3:
            fast = xxhash.xxh3_128(fields, seed=self._seed)
            fast.update(in_host(payload))
            return fast.digest()
        keyed = hashlib.blake2b(fields, key=self._key, digest_size=DIGEST_BYTES)
        keyed.update(self._memory.leaf_hashes(payload, self._points))
        return keyed.digest()


def header_in(sealed: bytes) -> pb.KvChunkHeader | None:
    """The header that the bytes in front of an xxh3-128 payload say they are; None for others. Not
    verified: that takes the payload, see `Sealer.mismatch`."""
    if len(sealed) < HEADER_BYTES:
        return None
    magic, _, digest, instance_id, handover_id, *numbers, _, size = _FIELDS.unpack_from(sealed)
    if magic != _MAGIC or digest != DIGESTS.index(XXH3):
        return None
    index, first_position, num_positions, first_layer, num_layers, first_head, num_heads = numbers
    return pb.KvChunkHeader(
        instance_id=instance_id.hex(),
        handover_id=handover_id,
        index=index,
        first_position=first_position,
        num_positions=num_positions,
        first_layer=first_layer,
        num_layers=num_layers,
        first_head=first_head,
        num_heads=num_heads,
        payload_bytes=size,
        digest=sealed[_SEALED_BYTES:HEADER_BYTES],
    )


def layout_fingerprint(layout: KvLayout) -> bytes:
    """8 bytes over the fields of a layout that two workers must have in common."""
    values: tuple[str | int, ...] = (
        layout.model_digest,
        layout.dtype,
        layout.num_layers,
        layout.num_kv_heads,
        layout.key_size,
        layout.value_size,
    )
    if layout.state_positions:
        # Left out where there are none: workers of older versions do not know them.
        values = (*values, layout.state_positions)
    text = "|".join(map(str, values))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def positions_per_kv_chunk(buffer_bytes: int, layout: KvLayout) -> int:
    """How many whole positions fit a buffer of this size behind the header; 0 when none does."""
    return max(0, buffer_bytes - HEADER_BYTES) // layout.bytes_per_position


def check_buffer_bytes(buffer_bytes: int, layout: KvLayout) -> None:
    """Raises InvalidArgument when a buffer of this size holds no position."""
    if positions_per_kv_chunk(buffer_bytes, layout) == 0:
        raise InvalidArgument(
            f"a buffer must hold one position, {layout.bytes_per_position} bytes and a header",
            field="staging_mib",
        )


def probe_positions(buffer_bytes: int, layout: KvLayout) -> int:
    """How many positions a probe has: one KV chunk, and not a large one."""
    wanted = max(1, PROBE_BYTES // layout.bytes_per_position)
    return min(wanted, positions_per_kv_chunk(buffer_bytes, layout))


def made_up(handover_id: bytes, first_position: int, num_bytes: int) -> bytes:
    """The bytes of a probe's KV chunk; both sides can tell them from the id."""
    return hashlib.shake_128(handover_id + first_position.to_bytes(4, "little")).digest(num_bytes)


def pack_made_up(handover_id: bytes, memory: StagingMemory) -> Pack:
    """What a sender packs for a probe into a buffer of this memory."""

    async def pack(first_position: int, count: int, out: KvPayload) -> None:
        # A whole buffer of it takes longer than the event loop may stand still.
        make = partial(made_up, handover_id, first_position, out.nbytes)
        memory.write(out, await asyncio.to_thread(make) if out.nbytes > PROBE_BYTES else make())

    return pack
