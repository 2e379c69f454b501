"""A rank as a Ray actor: a process of its own, which ends with the worker that it works for.

Imports torch only when the process's threads are configured.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

from baton.engine.ranks.deaths import on_death
from baton.engine.ranks.family import sweep
from baton.engine.threads import configure

_TURN_S = 0.5


class RankActor:
    """worker: process id. folder: Ray's, see `family`. threads: of this rank. spin: whether these
    cores are its own, see `configure`."""

    def __init__(
        self, rank: int, size: int, folder: str, worker: int, threads: int, spin: bool
    ) -> None:
        on_death([worker], lambda: _leave(rank, folder))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        configure(threads if spin else 0)
        from baton.engine.ranks.rank import Rank

        self._rank = Rank(rank, size, Path(folder) / "ranks")

    def pid(self) -> int:
        return os.getpid()

    def answer(self, request: bytes) -> bytes:
        """See Rank.answer: bytes in, bytes out, and nothing is raised that Ray would pickle."""
        return self._rank.answer(request)


def _leave(rank: int, folder: str) -> None:
    """The worker is dead and nobody is left to be told. The first rank there is sweeps, and ends
    the others before their turn."""
    sleep(rank * _TURN_S)
    sweep(folder)
    os._exit(1)
