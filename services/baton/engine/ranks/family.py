"""Ends all processes of one Ray and removes its files; knows them by its folder.

Ray's servers end with the worker by themselves, by the kernel's death signal. Their helpers do not:
those notice late, or never, that their parent was killed. So whoever is left of a worker, itself or
its ranks, sweeps.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

FAMILY = "BATON_RAY"
"""Set to the folder of a worker's Ray in all of its processes."""

_LONGEST_S = 5.0
_POLL_S = 0.05


def sweep(folder: str) -> None:
    """Kills all others of the family, waits until they are gone, and removes the folder. Bounded.

    The caller must not need them any more.
    """
    end = monotonic() + _LONGEST_S
    while (left := _members(folder)) and monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str) -> list[int]:
    """Processes of this Ray but the caller; those that have ended and wait for their parent are
    none."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # It may end while it is looked at.
        with suppress(OSError):
            if _is_member(entry, folder):
                found.append(int(entry.name))
    return found


def _is_member(process: Path, folder: str) -> bool:
    """By the variable; or, as Ray writes its helpers' titles over their variables, by such a title
    and a log file."""
    if f"{FAMILY}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
        return True
    if not (process / "comm").read_text().startswith("ray::"):
        return False
    files = (os.readlink(file) for file in (process / "fd").iterdir())
    return any(file.startswith(f"{folder}/") for file in files)
