"""Moves one KV chunk from our own ring into our own ring, as if we were two workers.

It proves what a worker can prove before it knows another: packing, the seal, the transport's memory
and thread, verification and unpacking.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from baton.core.errors import BatonError, Unavailable
from baton.core.handover.messages import HANDOVER_ID_BYTES
from baton.core.handover.table import Run
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.transfer.buffers import StagingBuffer
from baton.transfer.collecting import READ_S
from baton.transfer.kv_chunk import HEADER_BYTES, Sealer
from baton.transfer.offer import Pack
from baton.transfer.staging import Staging
from baton.transfer.tasks import to_end
from baton.transfer.ticket import Unpack
from baton.transfer.transport import TransportError


async def probe_self(
    staging: Staging,
    name: str,
    me: WorkerIdentity,
    layout: KvLayout,
    num_positions: int,
    pack: Pack,
    unpack: Unpack,
) -> None:
    """Packs, seals, reads over the transport `name`, verifies and unpacks num_positions.

    pack and unpack raise BatonError when they find something wrong. Raises Unavailable saying what
    does not work.
    """
    buffers: list[StagingBuffer] = []
    try:
        async with asyncio.timeout(READ_S):
            for _ in range(2):
                buffers.append(await staging.ring.wait(me.instance_id))
            await _move(staging, name, me, layout, num_positions, buffers, pack, unpack)
    except TimeoutError:
        raise Unavailable("a KV chunk to ourselves takes too long") from None
    except TransportError as error:
        raise Unavailable(f"a KV chunk to ourselves was not read: {error}") from None
    except BatonError as error:
        raise Unavailable(f"a KV chunk to ourselves came to nothing: {error.message}") from None
    finally:
        for buffer in buffers:
            buffer.release()


async def _move(
    staging: Staging,
    name: str,
    me: WorkerIdentity,
    layout: KvLayout,
    num_positions: int,
    buffers: list[StagingBuffer],
    pack: Pack,
    unpack: Unpack,
) -> None:
    source, landing = buffers
    reader = staging.readers[name]
    sealer = Sealer(secrets.token_bytes(HANDOVER_ID_BYTES), me.instance_id, layout)
    header = sealer.header(Run(0, 0, num_positions))
    size = HEADER_BYTES + header.payload_bytes
    await to_end(pack(0, num_positions, source.view[HEADER_BYTES:size]))
    header = replace(header, digest=sealer.seal(header, source.view))
    await reader.add_peer(me.instance_id, reader.metadata, staging.ring.describe())
    try:
        await reader.read(me.instance_id, source.index, landing, size, READ_S)
    finally:
        await reader.remove_peer(me.instance_id)
    if wrong := sealer.mismatch(header, landing.view):
        raise Unavailable(f"its {wrong} did not arrive as it was sent")
    await to_end(unpack(0, num_positions, landing.view[HEADER_BYTES:size]))
