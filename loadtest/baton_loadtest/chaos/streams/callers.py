"""Which of our processes holds the other end of a TCP connection on this machine (Linux).

The kernel's tables name the socket of a port, and a process's open files name its sockets; neither
needs more rights than one has on one's own processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""gRPC speaks IPv4 through sockets of IPv6."""


def caller(local_port: int, remote_port: int, processes: Mapping[int, str]) -> str:
    """The name of the process, of those given by id, that connected from one port to another on
    loopback; "" when it is none of them."""
    inode = _inode(local_port, remote_port)
    for pid, name in processes.items():
        if inode and f"socket:[{inode}]" in _open_files(pid):
            return name
    return ""


def _inode(local_port: int, remote_port: int) -> str:
    """Of the connected socket, as the kernel's table has it: addresses are hexadecimal."""
    ends = (f":{local_port:04X}", f":{remote_port:04X}")
    for table in TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if columns[1].endswith(ends[0]) and columns[2].endswith(ends[1]):
                return columns[9]
    return ""


def _open_files(pid: int) -> set[str]:
    """What a process's open files are; none when it is gone."""
    found = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            # It may be closed by now.
            with suppress(OSError):
                found.add(os.readlink(file))
    return found
