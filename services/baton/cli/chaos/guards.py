"""A ring between two memories that nobody may write, which tells what changed where it must not."""

from __future__ import annotations

import ctypes
import mmap

from baton.cli.chaos.pattern import CANARY, differing
from baton.kv.slots import Slot, SlotRing

TRIES = 32


class WatchedRing(SlotRing):
    """Remembers which slots anybody has had."""

    taken: set[int]

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.taken = set()
        super().__init__(num_slots, slot_bytes)

    def take(self, peer: str) -> Slot | None:
        slot = super().take(peer)
        if slot is not None:
            self.taken.add(slot.index)
        return slot


class Guarded:
    """A ring and its guards, each as large as the ring itself.

    adjacent: how many guards lie right next to the ring. The system puts equal memories one below
    the other unless a gap ends between them; so gaps are filled up until it does.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        size = num_slots * slot_bytes
        self._canary = bytes([CANARY]) * size
        self._slot_canary = bytes([CANARY]) * slot_bytes
        self._before: dict[int, bytes] = {}
        fillers = []
        for _ in range(TRIES):
            self._above = mmap.mmap(-1, size)
            self.ring = WatchedRing(num_slots, slot_bytes)
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
        """Fills all slots. Only when every one is free."""
        for index in range(self.ring.num_slots):
            self.ring.view(index)[:] = self._slot_canary
        self.ring.taken.clear()

    def num_changed(self) -> int:
        """Bytes that changed in the guards and in slots that nobody has had since `clear`."""
        changed = sum(differing(guard[:], self._canary) for guard in self._guards)
        for index in set(range(self.ring.num_slots)) - self.ring.taken:
            changed += differing(self.ring.view(index), self._slot_canary)
        return changed

    def snapshot(self) -> None:
        """Remembers what lies in every slot now."""
        self._before = {i: bytes(self.ring.view(i)) for i in range(self.ring.num_slots)}

    def num_late(self) -> int:
        """Bytes that changed in slots since `snapshot`."""
        return sum(differing(self.ring.view(i), old) for i, old in self._before.items())


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
