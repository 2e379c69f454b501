"""Ranks as threads of this process, the double of `processes`: the same links, the same gloo.

Models in float32 only: transformers sets the number type for the whole process while a
network is built, and here several are at once.
"""

from __future__ import annotations

import socket
import threading
from time import monotonic

from torch import distributed

from batonlm.engine.ranks.link import Link, watch
from batonlm.engine.ranks.rank import Rank
from batonlm.engine.ranks.runner import FarMemory, Place

STOP_S = 5.0
"""How long the threads, all together, may take to end."""


class LocalRanks:
    """See `Ranks`. Threads that are out of step, and wait for another, are left behind as
    daemons."""

    def __init__(self, tensor: int, stages: int = 1):
        self.tensor, self.stages = tensor, stages
        self._store = distributed.HashStore()  # type: ignore[attr-defined]
        self._threads: list[threading.Thread] = []
        self.steps: list[Link] = []
        self.copies: list[Link] = []
        self.watched: list[Link] = []
        self.far: list[FarMemory] = []
        for rank in range(tensor * stages):
            pairs = [socket.socketpair() for _ in range(3)]
            for links, (ours, _) in zip(
                (self.steps, self.copies, self.watched), pairs, strict=True
            ):
                links.append(Link(ours))
            theirs = [Link(end) for _, end in pairs]
            thread = threading.Thread(
                target=self._serve, args=(rank, *theirs), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        for link in (*self.steps, *self.copies, *self.watched):
            link.close()
        end = monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _serve(self, rank: int, steps: Link, copies: Link, watched: Link) -> None:
        watch([watched], lambda: None)
        place = Place(rank, self.tensor, self.stages)
        Rank(place, self._store, neighbours=place.size).serve(steps, copies)
        for link in (steps, copies, watched):
            link.close()
