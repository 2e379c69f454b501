"""Finds ports for worker processes that nothing else takes before they do; binds none for good.

Only ports that the system does not hand out by itself: a router that keeps asking for a worker
which is not there yet could else be given that very port as its own end, connect to itself, and
leave the worker nothing to bind.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path

HOST = "127.0.0.1"
LOWEST = 15000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = (32768, 60999)


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Different ports on this machine's loopback that nobody listens on now.

    avoid: those that somebody is about to listen on.
    """
    first, last = _handed_out()
    candidates = [
        port for port in range(LOWEST, 65536) if not first <= port <= last and port not in avoid
    ]
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            break
        if _free(port):
            found.append(port)
    return found


def free_row(count: int) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    while True:
        (first,) = free_ports(1)
        if all(_free(port) for port in range(first, first + count)):
            return first


def _handed_out() -> tuple[int, int]:
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _USUAL
    return (first, last) if first > LOWEST + 1000 else _USUAL


def _free(port: int) -> bool:
    if port > 65535:
        return False
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
