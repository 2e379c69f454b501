"""What a probe carries: KV that no model computed and both sides can tell from its id.

Knows no hand-over and no transport.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial

from baton.core.model import KvLayout
from baton.kv.offer import Pack
from baton.kv.parcel import positions_per_parcel

PROBE_S = 8.0
"""Longer than a read may take, so that a read that hangs is told as one."""

PROBE_BYTES = 64 << 10


def probe_positions(slot_bytes: int, layout: KvLayout) -> int:
    """How many positions a probe has: one parcel, and not a large one."""
    wanted = max(1, PROBE_BYTES // layout.bytes_per_position)
    return min(wanted, positions_per_parcel(slot_bytes, layout))


def made_up(handover_id: bytes, first_position: int, num_bytes: int) -> bytes:
    """The bytes of a probe's parcel; both sides can tell them from the id."""
    return hashlib.shake_128(handover_id + first_position.to_bytes(4, "little")).digest(num_bytes)


def pack_made_up(handover_id: bytes) -> Pack:
    """What a giver packs for a probe."""

    async def pack(first_position: int, count: int, out: memoryview) -> None:
        # A whole slot of it takes longer than the event loop may stand still.
        make = partial(made_up, handover_id, first_position, len(out))
        out[:] = await asyncio.to_thread(make) if len(out) > PROBE_BYTES else make()

    return pack
