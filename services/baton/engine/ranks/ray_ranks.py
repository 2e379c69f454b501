"""Ranks as Ray actors on this machine, and a Ray of the worker's own around them.

It is started with the worker, serves nobody else, listens on loopback only, asks for a token that
nobody else knows, and ends with the worker however that one ends, see `family`. Ray is imported
here only, and only when a worker is told to have more than one rank.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from baton.core.errors import Internal, InvalidArgument, Unavailable
from baton.engine.config import MIB
from baton.engine.ranks.deaths import on_death
from baton.engine.ranks.family import FAMILY, sweep
from baton.engine.ranks.ray_actor import RankActor
from baton.engine.ranks.runner import FIELD

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * MIB
"""About the least that Ray takes. Plans are small, and KV does not go this way."""

START_S = 300.0
ANSWER_S = 1800.0
"""Reading the weights takes longest."""


class RayRanks:
    """See the port `Ranks`. threads: torch's, of each rank. spin: whether the operator has said
    that these cores are ours, see `threads`. Raises InvalidArgument, naming tensor_parallel,
    without Ray, and Unavailable when it does not start."""

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

    # It tells of signals that it leaves to us.
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
