"""Where `baton up` keeps what it writes, which of them runs, and what it says of itself.

The folder and all in it are the user's alone, because the state holds the run's token. A running
`baton up` holds a lock in it, which the kernel drops with the process. A process is named by its
number and the moment of its start, so that a later process with the same number is never taken for
it; where there is no /proc, by its number alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class AlreadyRuns(BatonError):
    """Another `baton up` of this user runs, or starts."""


def folder() -> Path:
    """Where state and logs of `baton up` live, by the XDG base directory rules."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "baton"


def state_file() -> Path:
    return folder() / "up.json"


def log_file() -> Path:
    return folder() / "up.log"


def lock_file() -> Path:
    return folder() / "up.lock"


def make_folder() -> Path:
    """The folder, made and closed to others. Raises OSError."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    # One of an earlier version could be read by all.
    folder().chmod(0o700)
    return folder()


@contextmanager
def locked() -> Iterator[None]:
    """Nobody else runs Baton with this folder meanwhile. Raises AlreadyRuns, and OSError."""
    make_folder()
    with open(os.open(lock_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRuns(who_runs() or "another 'baton up' runs with this folder") from None
        # What a run that was killed left behind.
        for stale in (state_file(), *folder().glob(".up.*")):
            stale.unlink(missing_ok=True)
        file.truncate(0)
        json.dump(process(os.getpid()), file)
        file.flush()
        try:
            yield
        finally:
            state_file().unlink(missing_ok=True)


def who_runs() -> str:
    """In words, with how to stop it; "" when none runs."""
    if (running := read()) is not None:
        where, pid = f"already running at {running['http']}", running["pid"]
    elif (owner := _owner()) is not None:
        where, pid = "another 'baton up' is starting", owner["pid"]
    else:
        return ""
    return f"{where} (process {pid}); 'baton down' stops it"


def write(state: dict[str, Any]) -> None:
    """Replaces the file in one go, so that a reader never sees half of it. Raises OSError."""
    descriptor, fresh = tempfile.mkstemp(prefix=".up.", dir=make_folder())
    try:
        with open(descriptor, "w") as file:
            file.write(json.dumps(state) + "\n")
        os.replace(fresh, state_file())
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise


def read() -> dict[str, Any] | None:
    """What the running `baton up` wrote when it was ready; None when none runs, or it starts."""
    return _of_a_running_process(state_file())


def stop() -> dict[str, Any] | None:
    """Asks the running `baton up` to end, also one that starts or that is stopped by a signal.
    Returns which process that is, or None when none runs.
    """
    owner = _owner() or read()
    if owner is None or not send(owner, signal.SIGTERM):
        return None
    send(owner, signal.SIGCONT)
    return owner


def process(pid: int) -> dict[str, Any]:
    """What tells a running process from all others."""
    return {"pid": pid, "started": started(pid)}


def started(pid: int) -> str:
    """When a process did, in words that no other process of this number has; "" where it cannot be
    known."""
    try:
        boot = _BOOT.read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def alive(known: dict[str, Any]) -> bool:
    """Whether a process of `process` runs. A zombie does not."""
    pid = int(known["pid"])
    if known.get("started", "") != started(pid):
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists()


def send(known: dict[str, Any], number: signal.Signals) -> bool:
    """Sends a signal to a process of `process`, and to no other that has its number meanwhile.
    False when it has ended.
    """
    pid = int(known["pid"])
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        descriptor = -1  # Only Linux has them, and not every sandbox.
    try:
        if not alive(known):
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def _owner() -> dict[str, Any] | None:
    """Who holds the lock, as far as the file says."""
    return _of_a_running_process(lock_file())


def _of_a_running_process(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found if alive(found) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
