"""What a reader of cache batches does with them: the other half of `CacheLog`, for tests."""

from __future__ import annotations

from typing import Protocol

from batonlm.core.kvcache.prefix import HASH_BYTES


class Batch(Protocol):
    """A CacheBatch, or the message that it becomes."""

    @property
    def first_number(self) -> int: ...
    @property
    def snapshot(self) -> bool: ...
    @property
    def added(self) -> bytes: ...
    @property
    def removed(self) -> bytes: ...


class CacheReplica:
    """The units that a worker's cache holds, as far as it was told."""

    def __init__(self) -> None:
        self.units: set[bytes] = set()
        self._number = -1
        self._in_snapshot = False

    def apply(self, batch: Batch) -> bool:
        """False when something is missing before it."""
        if batch.snapshot:
            if not self._in_snapshot or batch.first_number != self._number:
                self.units.clear()
            self._number = batch.first_number
        elif batch.first_number != self._number:
            return False
        else:
            self._number += (len(batch.added) + len(batch.removed)) // HASH_BYTES
        self._in_snapshot = batch.snapshot
        self.units |= set(hashes(batch.added))
        self.units -= set(hashes(batch.removed))
        return True


def hashes(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
