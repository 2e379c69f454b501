"""AcceptedInputs: what a worker without streams has accepted and not answered yet.

Tokenizers and encode workers answer inputs and keep nothing behind. Both bound what waits, refuse
the rest, and have drained once nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from batonlm.core.errors import Overloaded
from batonlm.core.routing.load import WorkerState

MAX_INPUTS = 256
"""Of one call."""

MAX_WAITING_BYTES = 64 << 20
"""Total size of inputs that are accepted and not answered yet; more are refused."""

RETRY_AFTER_S = 0.5


class AcceptedInputs:
    """Counts inputs by number and size. Used on one event loop."""

    def __init__(self, who: str, max_bytes: int = MAX_WAITING_BYTES) -> None:
        """who: the worker, as a refusal names it."""
        self.num = 0
        self._who = who
        self._max_bytes = max_bytes
        self._bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def state(self) -> WorkerState:
        return WorkerState.DRAINING if self._draining else WorkerState.SERVING

    @contextmanager
    def accepted(self, num: int, size: int) -> Iterator[None]:
        """Counts inputs until they are answered. size: their bytes together, which may exceed the
        bound where nothing else waits. Raises Overloaded."""
        if self.num and self._bytes + size > self._max_bytes:
            raise Overloaded(f"the {self._who} has too much to do", retry_after_s=RETRY_AFTER_S)
        self.num += num
        self._bytes += size
        self._idle.clear()
        try:
            yield
        finally:
            self.num -= num
            self._bytes -= size
            if not self.num:
                self._idle.set()

    async def drain(self) -> None:
        """Returns when every accepted input is answered."""
        self._draining = True
        await self._idle.wait()
