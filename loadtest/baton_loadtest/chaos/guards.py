"""A ring between two memories that nobody may write, which tells what changed where it must not."""

from __future__ import annotations

import ctypes
import mmap

from baton.transfer.staging import StagingBuffer, StagingPool
from baton_loadtest.chaos.pattern import CANARY, differing

TRIES = 32


class WatchedRing(StagingPool):
    """Remembers which buffers anybody has had."""

    taken: set[int]

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        self.taken = set()
        super().__init__(num_buffers, buffer_bytes)

    def take(self, peer: str) -> StagingBuffer | None:
        buffer = super().take(peer)
        if buffer is not None:
            self.taken.add(buffer.index)
        return buffer


class Guarded:
    """A ring and its guards, each as large as the ring itself.

    adjacent: how many guards lie right next to the ring. The system puts equal memories one below
    the other unless a gap ends between them; so gaps are filled up until it does.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        size = num_buffers * buffer_bytes
        self._canary = bytes([CANARY]) * size
        self._buffer_canary = bytes([CANARY]) * buffer_bytes
        self._before: dict[int, bytes] = {}
        fillers = []
        for _ in range(TRIES):
            self._above = mmap.mmap(-1, size)
            self.ring = WatchedRing(num_buffers, buffer_bytes)
            self._below = mmap.mmap(-1, size)
            self.adjacent = sum(
                _address(guard) - self.ring.base_address == distance
                for guard, distance in zip(self._guards, (size, -size), strict=True)
            )
            if self.adjacent == 2:
                break
            fillers.append((self._above, self.ring, self._below))
        for _, ring, _ in fillers:
            ring.close()
        for guard in self._guards:
            guard[:] = self._canary

    @property
    def _guards(self) -> tuple[mmap.mmap, mmap.mmap]:
        return self._above, self._below

    def clear(self) -> None:
        """Fills all buffers. Only when every one is free."""
        for index in range(self.ring.num_buffers):
            self.ring.view(index)[:] = self._buffer_canary
        self.ring.taken.clear()

    def num_changed(self) -> int:
        """Bytes that changed in the guards and in buffers that nobody has had since `clear`."""
        changed = sum(differing(guard[:], self._canary) for guard in self._guards)
        for index in set(range(self.ring.num_buffers)) - self.ring.taken:
            changed += differing(self.ring.view(index), self._buffer_canary)
        return changed

    def snapshot(self) -> None:
        """Remembers what lies in every buffer now."""
        self._before = {i: bytes(self.ring.view(i)) for i in range(self.ring.num_buffers)}

    def num_late(self) -> int:
        """Bytes that changed in buffers since `snapshot`."""
        return sum(differing(self.ring.view(i), old) for i, old in self._before.items())


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
