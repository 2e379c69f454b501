"""Ranks as threads of this process, the double of `ray_ranks`: the same messages, the same gloo.

Models in float32 only: transformers sets the number type for the whole process while a
network is built, and here several are at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory

from baton.core.errors import Internal
from baton.engine.ranks.rank import Rank

ANSWER_S = 120.0


class LocalRanks:
    """See `Ranks`. Threads that are out of step are left behind, as daemons."""

    def __init__(self, size: int):
        self.size = size
        self._folder = TemporaryDirectory(prefix="baton-ranks-")
        self._requests: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(size)]
        self._answers: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        for rank in range(size):
            threading.Thread(
                target=self._serve, args=(rank,), name=f"rank-{rank}", daemon=True
            ).start()

    def ask(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        for queue in self._requests:
            queue.put(request)
        for _ in range(self.size):
            try:
                yield self._answers.get(timeout=ANSWER_S)
            except Empty:
                raise Internal("a rank does not answer") from None

    def on_death(self, died: Callable[[], None]) -> None:
        """A thread ends with its process only."""

    def close(self) -> None:
        for queue in self._requests:
            queue.put(None)
        self._folder.cleanup()

    def _serve(self, number: int) -> None:
        rank = Rank(number, self.size, Path(self._folder.name) / "store")
        while (request := self._requests[number].get()) is not None:
            self._answers.put((number, rank.answer(request)))
