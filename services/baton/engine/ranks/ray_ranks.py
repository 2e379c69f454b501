"""Ranks as Ray actors on this machine, and a Ray of the worker's own around them.

Ray is started with the worker, serves nothing else, listens on loopback only, requires a token of
its own, and ends with the worker however that one ends. It is imported only when a worker
has more than one rank, and torch only in an actor whose threads are configured.

Ray's servers end with the worker by themselves, by the kernel's death signal. Their helpers do not:
those notice late, or never, that their parent was killed. So whichever process is left of a worker,
itself or its ranks, sweeps: it ends all processes of that Ray, found by its folder, and removes its
files.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from baton.core.errors import Internal, InvalidArgument, Unavailable
from baton.engine.config import MIB, configure_threads
from baton.engine.ranks.runner import FIELD


def on_death(pids: Iterable[int], died: Callable[[], None]) -> None:
    """Calls `died` once, on a thread of its own, when the first of the processes has ended.

    The thread is a daemon and sleeps until then. A process that is gone already counts.
    """
    waiting = select.poll()
    fds: list[int] = []
    gone = False
    for pid in pids:
        try:
            fds.append(os.pidfd_open(pid))
            waiting.register(fds[-1], select.POLLIN)
        except ProcessLookupError:
            gone = True

    def watch() -> None:
        if not gone:
            waiting.poll()
        for fd in fds:
            os.close(fd)
        died()

    threading.Thread(target=watch, name="deaths", daemon=True).start()


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


_TURN_S = 0.5


class RankActor:
    """worker: process id. folder: Ray's, see `family`. threads: of this rank. spin: whether these
    cores are its own, see `configure_threads`."""

    def __init__(
        self, rank: int, size: int, folder: str, worker: int, threads: int, spin: bool
    ) -> None:
        on_death([worker], lambda: _leave(rank, folder))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        configure_threads(threads if spin else 0)
        from baton.engine.ranks.rank import Rank

        self._rank = Rank(rank, size, Path(folder) / "ranks")

    def pid(self) -> int:
        return os.getpid()

    def answer(self, request: bytes) -> bytes:
        """See Rank.answer: bytes in, bytes out, and nothing is raised that Ray would pickle."""
        return self._rank.answer(request)


def _leave(rank: int, folder: str) -> None:
    """The worker is dead. The first rank that is left sweeps, and ends
    the others before their turn."""
    sleep(rank * _TURN_S)
    sweep(folder)
    os._exit(1)


log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * MIB
"""About the least that Ray takes. Plans are small, and KV does not go this way."""

START_S = 300.0
ANSWER_S = 1800.0
"""Reading the weights takes longest."""


class RayRanks:
    """See `Ranks`. threads: torch's, of each rank. spin: whether these cores are known to be ours
    alone, see `configure_threads`. Raises InvalidArgument, naming tensor_parallel, without Ray, and
    Unavailable when it does not start."""

    def __init__(self, size: int, threads: int, *, spin: bool = False):
        if find_spec("ray") is None:
            raise InvalidArgument(
                "more than one rank takes Ray: pip install 'baton[ranks]'", field=FIELD
            )
        self.size = size
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="baton-ray-")
        try:
            self._ray = _start(size, self._folder)
            make = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(RankActor)
            self._actors = [
                make.remote(rank, size, self._folder, os.getpid(), threads, spin)
                for rank in range(size)
            ]
            self._pids = self._ray.get([a.pid.remote() for a in self._actors], timeout=START_S)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            log.exception("Ray did not start")
            raise Unavailable("the ranks could not be started") from error

    def ask(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        ranks = {actor.answer.remote(request): i for i, actor in enumerate(self._actors)}
        waiting = list(ranks)
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1, timeout=ANSWER_S)
            if not done:
                raise Internal("a rank does not answer")
            try:
                answer = self._ray.get(done[0])
            except self._ray.exceptions.RayError:
                raise Internal("a rank has died") from None
            yield ranks[done[0]], answer

    def on_death(self, died: Callable[[], None]) -> None:
        on_death(self._pids, lambda: None if self._closed else died())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_ray"):
            self._ray.shutdown()
        sweep(self._folder)


def _start(size: int, folder: str) -> Any:
    """Ray, started for us alone."""
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        # What keeps Ray on loopback, on every system: it takes another address of the machine else.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        # Any free port, so that several workers of a machine do not want the same one.
        AUTOSCALER_METRIC_PORT="0",
        # Memory is planned at load: a rank is not what Ray should kill when it runs short.
        RAY_memory_monitor_refresh_ms="0",
    )
    os.environ[FAMILY] = folder
    # It reads them when it is imported.
    import ray

    # It logs signals that it leaves to us.
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=size,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    return ray
