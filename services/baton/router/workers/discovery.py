"""Where workers are: addresses by role, as they come and go.

What a source leaves out is not given up for that: the pools go on with whoever still answers. So a
source that fails, or that is a moment behind, keeps silent, and nothing is lost by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol


class Source(Protocol):
    """Told by DNS, by Kubernetes, or by a list: the addresses of one role."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yields all addresses (host:port) as soon as they are known and after every change, for
        ever. Called once. A source that cannot be asked yields nothing; it never raises.
        """

    def look_again(self) -> None:
        """Somebody did not answer: what is known may be old. Cheap, and called often."""


class Discovery:
    """The sources by role. The pools call `watch`, once per role; a role without a source is empty.

    Nothing runs while nobody watches.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def watch(self, role: str) -> AsyncIterator[frozenset[str]]:
        return self._source(role).watch()

    def look_again(self, role: str) -> None:
        self._source(role).look_again()

    def _source(self, role: str) -> Source:
        return self._sources.get(role) or StaticSource(())


class StaticSource:
    """A list that never changes."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses
        await asyncio.get_running_loop().create_future()

    def look_again(self) -> None:
        """A list does not grow old."""


class StaticDiscovery(Discovery):
    """Lists for all roles: role -> addresses."""

    def __init__(self, addresses: Mapping[str, Iterable[str]]) -> None:
        super().__init__({role: StaticSource(found) for role, found in addresses.items()})
