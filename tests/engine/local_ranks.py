"""Ranks as threads of this process, the double of `processes`: the same links, the same gloo.

Models in float32 only: transformers sets the number type for the whole process while a
network is built, and here several are at once.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import distributed

from batonlm.engine.ranks.link import Link
from batonlm.engine.ranks.rank import Rank
from batonlm.engine.ranks.runner import Place


class LocalRanks:
    """See `Ranks`. Threads that are out of step are left behind, as daemons."""

    def __init__(self, tensor: int, stages: int = 1):
        self.tensor, self.stages = tensor, stages
        self._folder = TemporaryDirectory(prefix="baton-ranks-")
        self.steps: list[Link] = []
        self.copies: list[Link] = []
        for rank in range(tensor * stages):
            pairs = [socket.socketpair() for _ in range(2)]
            self.steps.append(Link(pairs[0][0]))
            self.copies.append(Link(pairs[1][0]))
            theirs = Link(pairs[0][1]), Link(pairs[1][1])
            threading.Thread(
                target=self._serve, args=(rank, *theirs), name=f"rank-{rank}", daemon=True
            ).start()

    def close(self) -> None:
        for link in (*self.steps, *self.copies):
            link.close()
        self._folder.cleanup()

    def _serve(self, rank: int, steps: Link, copies: Link) -> None:
        place = Place(rank, self.tensor, self.stages)
        store = distributed.FileStore(  # type: ignore[attr-defined]
            str(Path(self._folder.name) / "store"), place.size
        )
        Rank(place, store, neighbours=place.size).serve(steps, copies)
        steps.close()
        copies.close()
