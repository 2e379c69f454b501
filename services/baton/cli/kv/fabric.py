"""What network hardware this machine has, what this process may do with it, and which way UCX took.

Hardware is read from /sys, /dev and /proc; what is not there is left out. The way of remote reads
is read from UCX's own log: UCX is made to write tables of the protocols that it selects
(UCX_PROTO_INFO). A table's first line names the endpoint, its second the operation; its rows are
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
    """A network interface. mbit: speed of its link, 0 when not known."""

    name: str
    mtu: int
    mbit: int


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """name: device:port, as UCX names it. mbit: speed of its link, 0 when not known."""

    name: str
    active: bool
    mbit: int


@dataclass(frozen=True, slots=True)
class Fabric:
    """rdma_files: whether /dev/infiniband has what user space talks to RDMA ports through.

    memlock: bytes that this process may lock in memory, None for no limit.
    """

    net: tuple[NetDevice, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    rdma_files: bool = False
    memlock: int | None = None

    @property
    def active(self) -> list[str]:
        """The RDMA ports that work."""
        return [port.name for port in self.rdma if port.active]

    @property
    def names(self) -> frozenset[str]:
        """Every name that UCX_NET_DEVICES may have here."""
        ports = [port.name for port in self.rdma]
        return frozenset({*ports, *(p.split(":")[0] for p in ports), *(d.name for d in self.net)})

    def net_device(self, name: str) -> NetDevice | None:
        return next((device for device in self.net if device.name == name), None)

    def mbit(self, name: str) -> int:
        """Speed of a device's link; 0 when not known."""
        links: list[NetDevice | RdmaPort] = [*self.net, *self.rdma]
        return next((link.mbit for link in links if link.name == name), 0)


def look(root: Path = Path("/")) -> Fabric:
    """Reads it all. root: where /sys, /dev and /proc are."""
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
    """Of a text like "100 Gb/sec (4X EDR)"."""
    found = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
    return round(float(found[1]) * 1000) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # Some interfaces have a speed and refuse to tell it.
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
