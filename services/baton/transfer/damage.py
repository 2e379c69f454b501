"""Ways to damage a KV chunk, in its buffer or in what is told of it; decides nothing about when.

Every function returns whether it changed anything: what changed nothing is no fault.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from dataclasses import replace

from baton.core.handover.messages import KvChunkHeader, KvChunkReady
from baton.transfer.fault_spec import Kind
from baton.transfer.kv_chunk import HEADER_BYTES

# Where fields of the binary header lie; see baton.transfer.kv_chunk.
_INSTANCE_ID, _LAYOUT, _LENGTH = slice(8, 24), slice(68, 76), slice(76, 84)

KEPT = 8


class Damage:
    """Damages KV chunks of one sender or receiver. Keeps a few old ones, to bring them back."""

    def __init__(self) -> None:
        self._kv_chunks: deque[bytes] = deque(maxlen=KEPT)
        self._headers: deque[KvChunkHeader] = deque(maxlen=KEPT)

    def keep(self, kv_chunk: memoryview) -> None:
        self._kv_chunks.append(bytes(kv_chunk))

    def keep_told(self, told: KvChunkReady) -> None:
        self._headers.append(told.header)

    def in_buffer(self, kind: Kind, part: str, kv_chunk: memoryview, draw: random.Random) -> bool:
        """KV chunk: header and payload as they lie in a buffer."""
        before = bytes(kv_chunk)
        match kind:
            case Kind.CORRUPT:
                _flip(kv_chunk, _part(part, kv_chunk), draw)
            case Kind.STALE:
                kv_chunk[_INSTANCE_ID] = draw.randbytes(16)
            case Kind.LAYOUT:
                kv_chunk[_LAYOUT] = draw.randbytes(8)
            case Kind.LENGTH:
                length = int.from_bytes(kv_chunk[_LENGTH], "little")
                kv_chunk[_LENGTH] = draw.randrange(1, length).to_bytes(8, "little")
            case Kind.REPLAY if self._kv_chunks:
                old = draw.choice(self._kv_chunks)
                where = _part(part, kv_chunk)
                where = slice(where.start, min(where.stop, len(old)))
                kv_chunk[where] = old[where]
            case _:
                return False
        return bytes(kv_chunk) != before

    def told(self, kind: Kind, told: KvChunkReady, draw: random.Random) -> KvChunkReady:
        """The announcement of a KV chunk, changed, or as it was when there is nothing to change to.

        Another hand-over's KV chunk comes back with the buffer of this one.
        """
        header = told.header
        match kind:
            case Kind.STALE:
                header = replace(header, instance_id=secrets.token_hex(16))
            case Kind.LAYOUT:
                header = replace(header, num_heads=header.num_heads + draw.randrange(1, 8))
            case Kind.LENGTH:
                header = replace(header, payload_bytes=draw.randrange(1, header.payload_bytes))
            case Kind.REPLAY if self._headers:
                header = draw.choice(self._headers)
        return replace(told, header=header)


def _part(part: str, kv_chunk: memoryview) -> slice:
    return {
        "header": slice(0, HEADER_BYTES),
        "payload": slice(HEADER_BYTES, len(kv_chunk)),
    }.get(part, slice(0, len(kv_chunk)))


def _flip(kv_chunk: memoryview, where: slice, draw: random.Random) -> None:
    """One bit."""
    kv_chunk[draw.randrange(where.start, where.stop)] ^= 1 << draw.randrange(8)
