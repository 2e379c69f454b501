"""How much of what was written to a connection its peer has really taken; writes nothing.

Bytes in our buffers, or in the kernel's, are not taken: only those that the peer acknowledged are.
Linux counts them; elsewhere only what leaves our own buffer can be seen.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

# From linux/tcp.h, struct tcp_info: unacked (segments), bytes_acked, notsent_bytes.
_UNACKED = struct.Struct("@24xI")
_BYTES_ACKED = struct.Struct("@120xQ")
_NOT_SENT = struct.Struct("@144xI")
_SIZE = 148
_TCP_INFO = getattr(socket, "TCP_INFO", None)


class Taken(NamedTuple):
    """waiting: whether something is not taken yet. mark: changes whenever the peer takes more."""

    waiting: bool
    mark: int


def taken(transport: asyncio.Transport) -> Taken:
    """Of a connection that is open."""
    buffered = transport.get_write_buffer_size()
    info = _tcp_info(transport)
    if info is None:
        return Taken(buffered > 0, buffered)
    (acked,), (unacked,), (unsent,) = (
        part.unpack_from(info) for part in (_BYTES_ACKED, _UNACKED, _NOT_SENT)
    )
    return Taken(bool(buffered or unacked or unsent), acked)


def _tcp_info(transport: asyncio.Transport) -> bytes | None:
    if _TCP_INFO is None:
        return None
    try:
        info: bytes = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, _TCP_INFO, _SIZE
        )
    except (OSError, AttributeError):
        return None
    return info if len(info) == _SIZE else None


def end_at_once(transport: asyncio.Transport) -> None:
    """Closes with a reset: the kernel then keeps nothing for a peer that reads nothing."""
    with suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()


def bound_buffer(transport: asyncio.Transport, num_bytes: int) -> None:
    """Bounds what the kernel holds for a connection."""
    with suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes
        )
