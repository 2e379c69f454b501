"""Ends the listening of a port while its connections go on; knows no gRPC and no service.

gRPC for Python cannot do that: its `Server.stop` also throws away calls that have arrived and were
not begun, whose callers then read CANCELLED.
"""

from __future__ import annotations

import os
import socket


def stop_listening(port: int) -> int:
    """Whoever connects to a TCP port of this process from now on is refused. Returns how many
    sockets listened there.
    """
    return sum(_end(descriptor, port) for descriptor in _descriptors())


def _descriptors() -> list[int]:
    # Not /proc/self/fd, which only Linux has.
    return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]


def _end(descriptor: int, port: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # closed meanwhile, or no socket
    with copy:
        try:
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens or copy.getsockname()[1:2] != (port,):
                return False
            # Of the socket itself, so gRPC's own descriptor stops too.
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
