"""Reads this machine's network hardware, this process's access to it, and the path that UCX chose.

Hardware is read from /sys, /dev and /proc; missing entries are left out. The path of remote reads
is read from UCX's log: with UCX_PROTO_INFO UCX writes tables of the protocols that it selects. A
table's first line names the endpoint, its second the operation; its rows are
`range | description | way`, the way as transport/device.
"""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface."""

    name: str
    mtu: int
    mbit: int
    """Speed of the link; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device."""

    name: str
    """device:port, as in UCX."""
    active: bool
    mbit: int
    """Speed of the link; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """This machine's network hardware and this process's access to it."""

    net: tuple[NetDevice, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    rdma_files: bool = False
    """Whether /dev/infiniband has the files through which user space uses RDMA ports."""
    memlock: int | None = None
    """Bytes of memory that this process may lock; None: no limit."""

    @property
    def active(self) -> list[str]:
        """The names of the active RDMA ports."""
        return [port.name for port in self.rdma if port.active]

    @property
    def names(self) -> frozenset[str]:
        """All names that UCX_NET_DEVICES may have here."""
        ports = [port.name for port in self.rdma]
        return frozenset({*ports, *(p.split(":")[0] for p in ports), *(d.name for d in self.net)})

    def net_device(self, name: str) -> NetDevice | None:
        return next((device for device in self.net if device.name == name), None)

    def mbit(self, name: str) -> int:
        """Returns the speed of a device's link; 0 if unknown."""
        links: list[NetDevice | RdmaPort] = [*self.net, *self.rdma]
        return next((link.mbit for link in links if link.name == name), 0)


def look(root: Path = Path("/")) -> Fabric:
    """Reads all of it. root: the parent of /sys, /dev and /proc."""
    rdma = tuple(
        RdmaPort(f"{p.parent.parent.name}:{p.name}", "ACTIVE" in _text(p / "state"), _rate(p))
        for p in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    )
    net = tuple(
        NetDevice(folder.name, _number(folder / "mtu"), max(0, _number(folder / "speed")))
        for folder in sorted((root / "sys/class/net").glob("*"))
        if folder.is_dir()
    )
    files = any((root / "dev/infiniband").glob("uverbs*"))
    return Fabric(net, rdma, files, _memlock(root))


def _memlock(root: Path) -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"), re.MULTILINE)
    may = found is not None and int(found[1], 16) >> _CAP_IPC_LOCK & 1
    return None if may or limit == resource.RLIM_INFINITY else limit


def _rate(port: Path) -> int:
    """Parses a text like "100 Gb/sec (4X EDR)"."""
    found = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
    return round(float(found[1]) * 1000) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # Some interfaces have the file of their speed but do not allow reading it.
        return ""


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return 0


_TITLE = "remote memory read"
_ROW = re.compile(r"\|\s*(\S+\.\.\S+)\s*\|\s*(.*?)\s*\|\s*(.*?)\s*\|\s*$")
_WAY = re.compile(r"([a-z_0-9]+)/([^\s,|]+)")


@dataclass(frozen=True, slots=True)
class Way:
    """The path of remote reads."""

    transport: str
    """UCX's name."""
    device: str
    """Name as in UCX_NET_DEVICES."""
    software: bool
    """Whether the peer's CPU serves the read, rather than its network hardware."""


def environment(log: Path) -> dict[str, str]:
    """Returns the variables with which UCX writes its choices to a file."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": str(log)}


def way_of_reads(log: Path) -> Way | None:
    """Returns the path of the largest reads; None if the log does not contain it."""
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
