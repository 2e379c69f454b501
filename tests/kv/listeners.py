"""Where a process takes TCP connections, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

LISTEN = "0A"


def listeners(pid: int) -> list[tuple[str, int]]:
    """Address and port of every listening TCP socket of a process."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's own byte order."""
    raw = bytes.fromhex(text)
    words = [raw[i : i + 4] for i in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    # gRPC listens on IPv4 through sockets of IPv6.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
