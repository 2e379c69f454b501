"""CachedUnits, which units of 64 tokens a prefix cache holds.

A unit is in the cache when every block up to its end is: a block whose predecessor was evicted
cannot be found, so its units are gone with the predecessor's, and back with it. A block that is
longer than what its units need may share them with others; a unit stays as long as one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from baton.core.kvcache.prefix import PrefixLink

Change = tuple[bytes, bool]
"""A unit's hash, and whether it came (or went)."""

Tell = Callable[[Change], object]


class CachedUnits:
    """Follows links as they come and go, and tells every change of a unit once, in order.

    Costs a few dictionary operations per link, and per link after it when a predecessor goes.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._links: dict[bytes, PrefixLink] = {}
        self._next: dict[bytes, set[bytes]] = {}
        """Links that are here by their parents, whether those are here or not."""
        self._found: set[bytes] = set()
        """Links that can be found from the start of their chain."""
        self._holders: Counter[bytes] = Counter()
        """How many found links a unit ends in."""

    @property
    def present(self) -> set[bytes]:
        return set(self._holders)

    def add(self, link: PrefixLink) -> None:
        """A link that is not here yet came."""
        self._links[link.digest] = link
        self._next.setdefault(link.parent, set()).add(link.digest)
        if link.depth and link.parent not in self._found:
            return
        found_now = self._and_after(link) if link.digest in self._next else (link,)
        for found in found_now:
            self._found.add(found.digest)
            for unit in found.units:
                if unit not in self._holders:
                    self._tell((unit, True))
                self._holders[unit] += 1

    def remove(self, link: PrefixLink) -> None:
        """A link that is here went."""
        if link.digest in self._found:
            for lost in self._and_after(link):
                self._found.remove(lost.digest)
                for unit in lost.units:
                    self._holders[unit] -= 1
                    if not self._holders[unit]:
                        del self._holders[unit]
                        self._tell((unit, False))
        del self._links[link.digest]
        siblings = self._next[link.parent]
        siblings.remove(link.digest)
        if not siblings:
            del self._next[link.parent]

    def _and_after(self, link: PrefixLink) -> Iterable[PrefixLink]:
        """The link and all that can be found through it."""
        pending = [link]
        while pending:
            link = pending.pop()
            yield link
            pending += [self._links[digest] for digest in self._next.get(link.digest, ())]


def units_in(links: Iterable[PrefixLink]) -> set[bytes]:
    """The units that a cache of these links holds, found the slow way."""
    found: dict[bytes, PrefixLink] = {}
    for link in sorted(links, key=lambda link: link.depth):
        if not link.depth or link.parent in found:
            found[link.digest] = link
    return {unit for link in found.values() for unit in link.units}
