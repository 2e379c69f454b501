"""CacheLog, the numbered changes of a worker's prefix cache.

Every change has a number, from 0. A reader gets a snapshot first, which carries the number of the
first change after it, and then all changes in order; one that falls behind what is kept gets a
snapshot again. So whoever applies what it reads in order holds exactly the units that are present,
and a number that does not go on from the last one shows that something is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from baton.core.kvcache.cached_units import Change
from baton.core.kvcache.prefix import HASH_BYTES

MAX_KEPT = 16384
"""Changes that a reader may be behind: a million tokens' worth."""

BATCH_UNITS = 4096
"""64 KiB of hashes."""


@dataclass(frozen=True, slots=True)
class CacheBatch:
    """Consecutive changes, no unit twice. added, removed: hashes, concatenated.

    first_number: of its first change; the next batch's is as many hashes further on. All parts of a
    snapshot have the number of the first change after it, and only add; there is at least one.
    """

    first_number: int
    added: bytes = b""
    removed: bytes = b""
    snapshot: bool = False

    @property
    def next_number(self) -> int:
        size = 0 if self.snapshot else len(self.added) + len(self.removed)
        return self.first_number + size // HASH_BYTES


class CacheLog:
    """changes: what `CachedUnits` told, oldest first; taken from the left as it is read.

    Another thread may append to them meanwhile: that is all that producer and reader share. Whoever
    owns the log calls `collect` often enough that few changes wait there.
    """

    def __init__(self, changes: deque[Change], *, max_kept: int = MAX_KEPT) -> None:
        self._changes = changes
        self._kept: deque[Change] = deque(maxlen=max_kept)
        self._present: dict[bytes, None] = {}
        """In order of coming: what a unit goes on from was there before it."""
        self._next_number = 0

    def collect(self) -> None:
        """Numbers what was told since."""
        while self._changes:
            change = self._changes.popleft()
            unit, came = change
            if came:
                self._present[unit] = None
            else:
                del self._present[unit]
            self._kept.append(change)
            self._next_number += 1

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
