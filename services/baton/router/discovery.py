"""Where workers are: addresses by role, as they come and go. Knows nothing of the workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol


class Discovery(Protocol):
    """Told by DNS, by Kubernetes, or by a list. The pools call `watch`, once per role."""

    def watch(self, role: str) -> AsyncIterator[frozenset[str]]:
        """Yields all addresses (host:port) of a role, at once and after every change, for ever."""


class StaticDiscovery:
    """A list that never changes: role -> addresses."""

    def __init__(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        self._addresses = addresses

    async def watch(self, role: str) -> AsyncIterator[frozenset[str]]:
        yield frozenset(self._addresses.get(role, ()))
        await asyncio.get_running_loop().create_future()
