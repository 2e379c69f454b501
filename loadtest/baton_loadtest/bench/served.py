"""Notes how long each request was really served, by what was done; does none of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter


class Times:
    """Seconds that each request was served, by what was done. serve_s: what everything takes."""

    def __init__(self) -> None:
        self.serve_s = 0.0
        self._spent: defaultdict[str, dict[int, float]] = defaultdict(dict)

    @asynccontextmanager
    async def serve(self, what: str, *requests: int) -> AsyncIterator[None]:
        """What is within, and the time it is said to take."""
        began = perf_counter()
        yield
        if self.serve_s:
            await asyncio.sleep(self.serve_s)
        for request in requests:
            self._spent[what][request] = perf_counter() - began

    def take(self) -> dict[str, dict[int, float]]:
        spent, self._spent = self._spent, defaultdict(dict)
        return spent
