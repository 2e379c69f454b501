"""What a probe carries: KV that no model computed and both sides can tell from its id."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial

from baton.core.request.model import KvLayout
from baton.transfer.kv_chunk import positions_per_kv_chunk
from baton.transfer.offer import Pack

PROBE_S = 8.0
"""Longer than a read may take, so that a read that hangs is told as one."""

PROBE_BYTES = 64 << 10


def probe_positions(buffer_bytes: int, layout: KvLayout) -> int:
    """How many positions a probe has: one KV chunk, and not a large one."""
    wanted = max(1, PROBE_BYTES // layout.bytes_per_position)
    return min(wanted, positions_per_kv_chunk(buffer_bytes, layout))


def made_up(handover_id: bytes, first_position: int, num_bytes: int) -> bytes:
    """The bytes of a probe's KV chunk; both sides can tell them from the id."""
    return hashlib.shake_128(handover_id + first_position.to_bytes(4, "little")).digest(num_bytes)


def pack_made_up(handover_id: bytes) -> Pack:
    """What a sender packs for a probe."""

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        # A whole buffer of it takes longer than the event loop may stand still.
        make = partial(made_up, handover_id, first_position, len(out))
        out[:] = await asyncio.to_thread(make) if len(out) > PROBE_BYTES else make()

    return pack
