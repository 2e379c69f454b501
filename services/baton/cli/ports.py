"""Finds ports for worker processes that nothing else takes before they do; listens on none itself.

Only ports that the system does not hand out by itself: a router that keeps asking for a worker
which is not there yet could else be given that very port as its own end, connect to itself, and
leave the worker nothing to bind. A worker with a large model listens minutes after its port was
chosen: what one process has been given, no other process on this machine is given while the first
one lives.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections import deque
from collections.abc import Collection
from pathlib import Path

HOST = "127.0.0.1"
LOWEST = 15000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = (32768, 60999)
# The descriptor of an abstract Unix socket for each port given, newest last. Such names live in the
# network namespace, as ports do, and go with the process whatever ends it. So many at most: a test
# process asks for many.
_given: deque[int] = deque()
_MOST_GIVEN = 256


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Different ports on this machine's loopback that nobody listens on or was given.

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
        if _free(port) and _give(port):
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


def _give(port: int) -> bool:
    """Whether no other process was given this port; it is this process's then."""
    if not sys.platform.startswith("linux"):
        return True  # Nobody else has abstract names.
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0baton-port-{port}")
    except OSError:
        mark.close()
        return False
    _given.append(mark.detach())
    if len(_given) > _MOST_GIVEN:
        os.close(_given.popleft())
    return True


def _free(port: int) -> bool:
    if port > 65535:
        return False
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
