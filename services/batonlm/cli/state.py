"""The folder where `baton up` keeps its files, the lock of the running one, and its state.

The folder is accessible to its user only, because the state contains the run's token. A running
`baton up` holds a lock in it, which the kernel releases when the process ends. A process is
identified by its pid and start time, so that a later process with the same pid is not mistaken for
it; without /proc, by its pid alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from batonlm.core.errors import BatonError, InvalidArgument

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class AlreadyRuns(BatonError):
    """Another `baton up` of this user runs or is starting."""


NAME_VARIABLE = "BATON_NAME"
"""Names the Baton that all commands mean, where several run on one machine. Empty: the one without
a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_NAMED = "named"


def choose(name: str) -> None:
    """Makes this process, and those that it starts, mean the Baton of this name. Raises
    InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "must be 1 to 32 letters, digits, - and _, and begin with a letter or digit",
            field="name",
        )
    os.environ[NAME_VARIABLE] = name


def option() -> str:
    """Returns the option that chooses this Baton on a command line; "" for the unnamed one."""
    name = os.environ.get(NAME_VARIABLE, "")
    return f" --name {name}" if name else ""


def folder() -> Path:
    """Returns the folder of the state and logs, by the XDG base directory rules. Raises
    InvalidArgument for a wrong name in the environment."""
    name = os.environ.get(NAME_VARIABLE, "")
    if not name:
        return _base()
    choose(name)
    return _base() / _NAMED / name


def _base() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "baton"


def everyone() -> dict[str, dict[str, Any]]:
    """Returns the states of all running Batons of this user, by name."""
    files = {"": _base() / _STATE}
    files |= {path.parent.name: path for path in sorted(_base().glob(f"{_NAMED}/*/{_STATE}"))}
    found = {name: _of_a_running_process(file) for name, file in files.items()}
    return {name: running for name, running in found.items() if running is not None}


_STATE = "up.json"


def state_file() -> Path:
    return folder() / _STATE


def log_file() -> Path:
    return folder() / "up.log"


def lock_file() -> Path:
    return folder() / "up.lock"


def make_folder() -> Path:
    """Creates the folder, accessible to the user only. Raises OSError."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    # Earlier versions created it readable for all users.
    folder().chmod(0o700)
    return folder()


@contextmanager
def locked() -> Iterator[None]:
    """Holds the lock of the folder. Raises AlreadyRuns, and OSError."""
    make_folder()
    with open(os.open(lock_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRuns(who_runs() or "another 'baton up' runs with this folder") from None
        # Files of a run that was killed.
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
    """Describes the running `baton up` and how to stop it; "" if none runs."""
    if (running := read()) is not None:
        where, pid = f"already running at {running['http']}", running["pid"]
    elif (owner := _owner()) is not None:
        where, pid = "another 'baton up' is starting", owner["pid"]
    else:
        return ""
    return f"{where} (process {pid}); 'baton down{option()}' stops it"


def write(state: dict[str, Any]) -> None:
    """Replaces the file atomically, so that a reader never sees a part of it. Raises OSError."""
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
    """Returns what the running `baton up` wrote when it was ready; None if none runs or it is still
    starting."""
    return _of_a_running_process(state_file())


def stop() -> dict[str, Any] | None:
    """Sends SIGTERM to the running `baton up`, even if it is starting or suspended. Returns its
    process, or None if none runs.
    """
    owner = _owner() or read()
    if owner is None or not send(owner, signal.SIGTERM):
        return None
    send(owner, signal.SIGCONT)
    return owner


def process(pid: int) -> dict[str, Any]:
    """Returns the identity of a running process."""
    return {"pid": pid, "started": started(pid)}


def started(pid: int) -> str:
    """Returns a text with boot id and start time, unique among processes with this pid; "" if that
    cannot be read."""
    try:
        boot = _BOOT.read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""


def alive(known: dict[str, Any]) -> bool:
    """Returns whether a process runs, given its identity. A zombie does not."""
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
    """Sends a signal to a process, given its identity, and never to another one with the same pid.
    Returns False if it has ended.
    """
    pid = int(known["pid"])
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        descriptor = -1  # Only Linux has pidfds, and not every sandbox allows them.
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
    """Returns the process that holds the lock, as recorded in the file."""
    return _of_a_running_process(lock_file())


def _of_a_running_process(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found if alive(found) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
