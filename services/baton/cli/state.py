"""The file in which a running `baton up` says where it is; knows nothing of processes' insides."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Where state and logs of `baton up` live, by the XDG base directory rules."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "baton"


def state_file() -> Path:
    return folder() / "up.json"


def log_file() -> Path:
    return folder() / "up.log"


def write(state: dict[str, Any]) -> None:
    """Replaces the file in one go, so that a reader never sees half of it."""
    folder().mkdir(parents=True, exist_ok=True)
    fresh = state_file().with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(state) + "\n")
    fresh.replace(state_file())


def read() -> dict[str, Any] | None:
    """What the running `baton up` wrote, or None when none runs (a stale file counts as none)."""
    try:
        state = json.loads(state_file().read_text())
        pid = int(state["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if alive(pid) else None


def remove(pid: int) -> None:
    """Removes the file if it is this supervisor's."""
    state = read()
    if state is not None and state["pid"] == pid:
        state_file().unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists()
