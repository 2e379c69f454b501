"""Cache events: which units of 64 tokens a worker's prefix cache holds, and their numbered changes.

A unit is in the cache when every block up to its end is: a block whose predecessor was evicted
cannot be found, so its units are gone with the predecessor's, and back with it. A block that is
longer than what its units need may share them with others; a unit stays as long as one of them.

Where computing can go on only behind blocks with the state of a sequence, which are marked, a unit
is in the cache when it is the last one of a marked block. The units before it need not be.

Every change has a number, from 0. A reader gets a snapshot first, which carries the number of the
first change after it, and then all changes in order; one that falls behind what is kept gets a
snapshot again. So a reader that applies what it gets in order holds exactly the units that are
present, and a number that does not go on from the last one shows that something is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice, takewhile

from batonlm.core.kvcache.prefix import HASH_BYTES, PrefixLink

TIERS = ("host", "disk", "store")
"""Where units may be that are in no prefix cache, the fastest first."""

Change = tuple[bytes, bool]
"""A unit's hash, and whether it came (or went)."""

OnChange = Callable[[Change], object]


class CachedUnits:
    """Follows links as they come and go, and reports every change of a unit once, in order.

    Costs a few dictionary operations per link, and per link after it when a predecessor goes.
    """

    def __init__(self, report: OnChange, *, marked_only: bool = False) -> None:
        """marked_only: see `mark`."""
        self._report = report
        self._marked: set[bytes] | None = set() if marked_only else None
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
            self._hold(found)

    def remove(self, link: PrefixLink) -> None:
        """A link that is here went."""
        if link.digest in self._found:
            for lost in self._and_after(link):
                self._found.remove(lost.digest)
                self._let_go(lost)
        del self._links[link.digest]
        siblings = self._next[link.parent]
        siblings.remove(link.digest)
        if not siblings:
            del self._next[link.parent]

    def mark(self, link: PrefixLink) -> None:
        """A link that is here counts from now on; without `marked_only` all do."""
        if self._marked is not None:
            self._marked.add(link.digest)
            if link.digest in self._found:
                self._hold(link)

    def unmark(self, link: PrefixLink) -> None:
        """A link that is here, and was marked, counts no more."""
        if self._marked is not None:
            if link.digest in self._found:
                self._let_go(link)
            self._marked.remove(link.digest)

    def _hold(self, link: PrefixLink) -> None:
        for unit in _units_of(link, self._marked):
            if unit not in self._holders:
                self._report((unit, True))
            self._holders[unit] += 1

    def _let_go(self, link: PrefixLink) -> None:
        for unit in _units_of(link, self._marked):
            self._holders[unit] -= 1
            if not self._holders[unit]:
                del self._holders[unit]
                self._report((unit, False))

    def _and_after(self, link: PrefixLink) -> Iterable[PrefixLink]:
        """The link and all that can be found through it."""
        pending = [link]
        while pending:
            link = pending.pop()
            yield link
            pending += [self._links[digest] for digest in self._next.get(link.digest, ())]


def _units_of(link: PrefixLink, marked: Set[bytes] | None) -> tuple[bytes, ...]:
    """The units that a link which is found stands for. marked: the links that count; None: all."""
    if marked is None:
        return link.units
    return link.units[-1:] if link.digest in marked else ()


def units_in(links: Iterable[PrefixLink], marked: Set[bytes] | None = None) -> set[bytes]:
    """The units that a cache of these links holds, found the slow way. marked: the links that
    count; None: all."""
    found: dict[bytes, PrefixLink] = {}
    for link in sorted(links, key=lambda link: link.depth):
        if not link.depth or link.parent in found:
            found[link.digest] = link
    return {unit for link in found.values() for unit in _units_of(link, marked)}


MAX_KEPT = 16384
"""Changes that a reader may be behind: a million tokens' worth."""

BATCH_UNITS = 4096
"""64 KiB of hashes."""


@dataclass(frozen=True, slots=True)
class CacheBatch:
    """Consecutive changes, no unit twice."""

    first_number: int
    """Of its first change; the next batch's is as many hashes further on. All parts of a snapshot
    have the number of the first change after it."""
    added: bytes = b""
    """Hashes, concatenated."""
    removed: bytes = b""
    """Hashes, concatenated."""
    snapshot: bool = False
    """Whether it is part of one: these only add, and there is at least one."""
    tier: str = ""
    """Which of TIERS it is about; empty: the prefix cache."""

    @property
    def next_number(self) -> int:
        size = 0 if self.snapshot else len(self.added) + len(self.removed)
        return self.first_number + size // HASH_BYTES


class CacheLog:
    """The newest changes, and all units that are present. The owner calls `collect` often enough
    that few changes wait."""

    def __init__(self, changes: deque[Change], *, max_kept: int = MAX_KEPT) -> None:
        """changes: what `CachedUnits` reports, oldest first; taken from the left as it is read.
        Another thread may append to them meanwhile: that is all that producer and reader share."""
        self._changes = changes
        self._kept: deque[Change] = deque(maxlen=max_kept)
        self._present: dict[bytes, None] = {}
        """In order of coming: what a unit goes on from was there before it."""
        self._next_number = 0

    def collect(self) -> None:
        """Numbers what was reported since."""
        while self._changes:
            change = self._changes.popleft()
            unit, came = change
            if came:
                self._present[unit] = None
            else:
                del self._present[unit]
            self._kept.append(change)
            self._next_number += 1

    def num_leading(self, units: Iterable[bytes]) -> int:
        """How many of these units, from the first one on, were present by what was collected."""
        return sum(1 for _ in takewhile(self._present.__contains__, units))

    def read(self, number: int | None) -> list[CacheBatch]:
        """All from a change's number on; a snapshot for None and for what is not kept any more."""
        self.collect()
        behind = self._next_number - number if number is not None else None
        if behind is None or not 0 <= behind <= len(self._kept):
            return list(self._snapshot())
        return list(self._batches(behind))

    def _snapshot(self) -> Iterator[CacheBatch]:
        units = b"".join(self._present)
        size = BATCH_UNITS * HASH_BYTES
        for start in range(0, max(1, len(units)), size):
            yield CacheBatch(self._next_number, units[start : start + size], snapshot=True)

    def _batches(self, behind: int) -> Iterator[CacheBatch]:
        """The newest `behind` changes. What comes or goes again begins a new batch."""
        number = self._next_number - behind
        parts: dict[bytes, bool] = {}
        # From the right: readers are hardly ever far behind, and a deque is slow in its middle.
        for unit, came in reversed(list(islice(reversed(self._kept), behind))):
            if unit in parts or len(parts) == BATCH_UNITS:
                yield _batch(number, parts)
                number, parts = number + len(parts), {}
            parts[unit] = came
        if parts:
            yield _batch(number, parts)


class CacheReader:
    """One reader's place in a log."""

    def __init__(self, log: CacheLog) -> None:
        self._log = log
        self._number: int | None = None

    def read(self) -> list[CacheBatch]:
        """What is new: first a snapshot, later often nothing."""
        batches = self._log.read(self._number)
        if batches:
            self._number = batches[-1].next_number
        return batches


def _batch(number: int, parts: dict[bytes, bool]) -> CacheBatch:
    added = b"".join(unit for unit, came in parts.items() if came)
    return CacheBatch(number, added, b"".join(unit for unit, came in parts.items() if not came))
