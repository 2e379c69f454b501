"""Tells whether files were replaced, and how often to look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LOOK_S = 1.0
"""How long a change may go unnoticed."""

Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """Differs when any of the files was written, replaced, or put behind another symbolic link.

    Links are followed, also those of folders: Kubernetes replaces a mounted Secret by turning the
    link of a folder. A file that cannot be looked at counts as absent.
    """
    return tuple(map(_of, paths))


def _of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
