"""Staging memory in equal slots, and who owns each; knows nothing of what lies in them.

`core.slot_states` says when a slot is free again. Too much of the ring in limbo, waiting for
transfers that nothing can stop, and only a restart of the process helps.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
from collections import Counter, deque

from baton.core.errors import Overloaded
from baton.core.handover_messages import RingDescription
from baton.core.slot_states import SlotEvent, SlotState, follow

ALIGNMENT = 4096
MAX_WAITING = 4096


class Slot:
    """A taken slot. Whoever took it calls `release` exactly once.

    view: the slot's memory, slot_bytes long. A transfer into it is bracketed by `lend` and
    `settle`; in between, `release` leaves the slot in limbo.
    """

    __slots__ = ("_ring", "_state", "index", "peer", "view")

    def __init__(self, ring: SlotRing, index: int, peer: str, view: memoryview) -> None:
        self._ring = ring
        self._state = follow(SlotState.FREE, SlotEvent.TAKE)
        self.index, self.peer, self.view = index, peer, view

    def release(self) -> None:
        self._move(SlotEvent.RELEASE)

    def lend(self) -> None:
        self._move(SlotEvent.LEND)

    def settle(self) -> None:
        """The transfer has ended, well or badly: it will not write any more."""
        self._move(SlotEvent.SETTLE)

    def _move(self, event: SlotEvent) -> None:
        before, self._state = self._state, follow(self._state, event)
        self._ring._moved(self, before, self._state)


class SlotRing:
    """num_slots slots of slot_bytes each, in one page-aligned memory. Used on the event loop only.

    The memory is an anonymous file (memfd) that cannot shrink: processes of the same machine may
    map it, and it is gone when the last of them is, however that one ended.
    No peer holds more than `share` slots, so a slow one leaves room for the others.

    worn_out: set once the ring is exhausted, and never cleared, even if slots come back. What
    watches it tells others to look elsewhere and ends the process; taking that back halfway would
    draw work to a ring that has just been lost to its peers, and a restart, the only thing that is
    sure to stop a transfer, costs seconds. no_limbo: set while no slot is in limbo.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 2:
            raise ValueError("num_slots must be at least 2")
        if slot_bytes < ALIGNMENT or slot_bytes % ALIGNMENT:
            raise ValueError(f"slot_bytes must be a multiple of {ALIGNMENT}")
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.share = max(2, num_slots // 2)
        size = num_slots * slot_bytes
        self.fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self.fd, size)
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        whole = memoryview(self._memory)
        self._views = [whole[i * slot_bytes : (i + 1) * slot_bytes] for i in range(num_slots)]
        whole.release()
        self._free = deque(range(num_slots))
        self._limbo = 0
        self.worn_out = asyncio.Event()
        self.no_limbo = asyncio.Event()
        self.no_limbo.set()
        self._held_by: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[Slot]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_limbo(self) -> int:
        return self._limbo

    @property
    def exhausted(self) -> bool:
        """More than a quarter is in limbo: stop taking work and restart the process."""
        return self._limbo * 4 > self.num_slots

    def describe(self) -> RingDescription:
        return RingDescription(self.base_address, self.slot_bytes, self.num_slots)

    def view(self, index: int) -> memoryview:
        """A slot's memory, whoever owns it."""
        return self._views[index]

    def take(self, peer: str) -> Slot | None:
        """A free slot for work with `peer`; None without one or when the peer has its share."""
        if not self._free or self._held_by[peer] >= self.share:
            return None
        index = self._free.popleft()
        self._held_by[peer] += 1
        return Slot(self, index, peer, self._views[index])

    async def wait(self, peer: str) -> Slot:
        """Waits for a slot, in order of arrival among those whose peer is below its share.

        The caller bounds the wait. Raises Overloaded when too many wait already.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many hand-overs wait for a slot")
        ready: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        entry = (peer, ready)
        self._waiting.append(entry)
        self._serve()
        try:
            return await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():
                ready.result().release()
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def close(self) -> None:
        """Lets go of the memory. Only when no transfer can touch it any more; idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # The mapping goes with the last view of it, which somebody may still hold.
        self._views.clear()
        del self._memory

    def _return(self, slot: Slot) -> None:
        self._free.append(slot.index)
        self._held_by[slot.peer] -= 1
        if not self._held_by[slot.peer]:
            del self._held_by[slot.peer]
        self._serve()

    def _moved(self, slot: Slot, before: SlotState, after: SlotState) -> None:
        self._limbo += (after is SlotState.LIMBO) - (before is SlotState.LIMBO)
        if self.exhausted:
            self.worn_out.set()
        if self._limbo:
            self.no_limbo.clear()
        else:
            self.no_limbo.set()
        if after is SlotState.FREE:
            self._return(slot)

    def _serve(self) -> None:
        for entry in list(self._waiting):
            peer, ready = entry
            if not self._free:
                return
            if ready.done():
                continue
            slot = self.take(peer)
            if slot is not None:
                self._waiting.remove(entry)
                ready.set_result(slot)
