"""Tells which shared memory nobody uses.

Other tests may run beside the one that asks, and their processes come and go: so what counts is not
what is there, but what no living process has.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = "/dev/shm"
_MAPPED = re.compile(rf"{FOLDER}/(.+?)(?: \(deleted\))?$", re.MULTILINE)


def abandoned() -> set[str]:
    """Names of files that no process has open or mapped. One that is just made may be among them
    for a moment."""
    names = set(os.listdir(FOLDER))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names -= set(_MAPPED.findall((process / "maps").read_text()))
            for file in (process / "fd").iterdir():
                names.discard(os.readlink(file).removeprefix(f"{FOLDER}/"))
        except OSError:
            # It has ended, or is not ours.
            continue
    return names
