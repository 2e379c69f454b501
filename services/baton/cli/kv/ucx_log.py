"""Reads from UCX's own log which way its remote reads took.

UCX is made to write tables of the protocols it selects (UCX_PROTO_INFO). A table's first line names
the endpoint, its second the operation; its rows are `range | description | way`, the way as
transport/device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TITLE = "remote memory read"
_ROW = re.compile(r"\|\s*(\S+\.\.\S+)\s*\|\s*(.*?)\s*\|\s*(.*?)\s*\|\s*$")
_WAY = re.compile(r"([a-z_0-9]+)/([^\s,|]+)")


@dataclass(frozen=True, slots=True)
class Way:
    """transport: UCX's name of it. device: as UCX_NET_DEVICES names it. software: the peer's
    processor serves the read; it is not read out of the peer's memory.
    """

    transport: str
    device: str
    software: bool


def environment(log: Path) -> dict[str, str]:
    """What makes UCX write its choices to a file."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(log)}


def way_of_reads(log: Path) -> Way | None:
    """The way of the largest reads; None when the log does not tell."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: Way | None = None
    of_peer = of_reads = False
    for line in lines:
        if "|" not in line:
            continue
        row = _ROW.search(line)
        if "cfg#" in line:
            # An agent has an endpoint to itself as well.
            of_peer, of_reads = " self cfg#" not in line, False
        elif row is None:
            of_reads |= of_peer and _TITLE in line
        elif of_reads and (way := _WAY.search(row[3])):
            found = Way(way[1], way[2], "software" in row[2])
    return found
