"""Reads how much host memory this process may still take, and gives back what it took and freed.

The kernel's own estimate for the machine, or what the process's control groups leave, whichever is
less. In both, file cache counts as free, because the kernel drops it when memory runs short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import Unavailable


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of a control group version's files and of the counters of its memory.stat."""

    limit: str
    used: str
    cache: tuple[str, ...]


_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def host_free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated now. Raises Unavailable where the kernel does not tell."""
    try:
        found = [_available(proc / "meminfo")]
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError as error:
        raise Unavailable("this system does not tell how much memory is free") from error
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left(cgroups, path, _V2)
        elif "memory" in controllers.split(","):
            found += _left(cgroups / "memory", path, _V1)
    return max(0, min(found))


def give_back_freed() -> None:
    """Returns freed memory that malloc keeps for later to the system; nothing where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable")


def _left(mount: Path, path: str, version: _Version) -> Iterator[int]:
    """What each group with a limit leaves, from the process's own up to the mounted root.

    Inside a container the path may be the host's, and only the mounted root be there.
    """
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        try:
            limit = (folder / version.limit).read_text().strip()
            used = int((folder / version.used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            yield int(limit) - used + sum(int(stat.get(name, 0)) for name in version.cache)
