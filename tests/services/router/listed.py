"""A source whose list a test changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable


class Listed:
    """What `set` says, at once."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._changes: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.doubts = 0
        self.lists = True
        self.set(addresses)

    def set(self, addresses: Iterable[str]) -> None:
        self._changes.put_nowait(frozenset(addresses))

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self._changes.get()

    def look_again(self) -> None:
        self.doubts += 1
