"""Finds free ports for worker processes. It listens on none itself.

It uses only ports that the system does not assign by itself. Otherwise a router that tries to
connect to a worker which does not listen yet could be assigned that port as its own local port and
connect to itself, and the worker could not bind the port. A worker with a large model listens
minutes after its port was chosen. So a port given to one process is given to no other process on
this machine while the first one lives.
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
# The descriptor of an abstract Unix socket for each port given, newest last. Abstract names belong
# to the network namespace, as ports do, and disappear with the process however it ends. Their
# number is limited because a test process asks for many ports.
_given: deque[int] = deque()
_MOST_GIVEN = 256


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Returns different loopback ports on which no process listens and which no process was given.

    avoid: ports that are about to be used.
    """
    found: list[int] = []
    for port in _shuffled(avoid):
        if len(found) == count:
            break
        if _free(port) and _give(port):
            found.append(port)
    return found


def free_row(count: int) -> int:
    """Returns the first of `count` consecutive ports, all of which are as those of free_ports."""
    candidates = _shuffled()
    usable = set(candidates)
    for first in candidates:
        row = range(first, first + count)
        # One that was given in vain stays so: the next row lies elsewhere.
        if usable.issuperset(row) and all(map(_free, row)) and all(map(_give, row)):
            return first
    raise OSError(f"no {count} consecutive ports are free")


def _shuffled(avoid: Collection[int] = ()) -> list[int]:
    first, last = _handed_out()
    ports = [
        port for port in range(LOWEST, 65536) if not first <= port <= last and port not in avoid
    ]
    return random.SystemRandom().sample(ports, len(ports))


def _handed_out() -> tuple[int, int]:
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _USUAL
    return (first, last) if first > LOWEST + 1000 else _USUAL


def _give(port: int) -> bool:
    """Reserves a port for this process. Returns False if another process has it."""
    if not sys.platform.startswith("linux"):
        return True  # Other systems have no abstract names.
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
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
