"""SwapSpace, who owns which blocks of swap memory; knows ids and counts, never what is in them.

Ids count from 0: first those in host memory, then those on disk. Ownership is a `SwapGrant`:
whoever got one releases it exactly once. A step in flight may still write or read its blocks, so
they are free again only when the newest step launched before the release is done. Whoever launches
steps therefore calls `launched` and `completed`, in order.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

from baton.core.kvcache.block_pool import InvariantBroken


class SwapPlace(Enum):
    """Kinds of swap memory, the faster one first."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, eq=False)
class SwapGrant:
    """Blocks of one kind of swap memory, in position order of what they hold."""

    place: SwapPlace
    blocks: tuple[int, ...]


class SwapSpace:
    """host_blocks and disk_blocks of swap memory; none of either by default."""

    def __init__(self, host_blocks: int = 0, disk_blocks: int = 0):
        if host_blocks < 0 or disk_blocks < 0:
            raise ValueError("swap memory cannot have fewer than no blocks")
        total = host_blocks + disk_blocks
        self._ids = {
            SwapPlace.HOST: range(host_blocks),
            SwapPlace.DISK: range(host_blocks, total),
        }
        self._free = {place: list(ids) for place, ids in self._ids.items()}
        self._grants: set[SwapGrant] = set()
        self._deferred: deque[tuple[int, SwapGrant]] = deque()
        self._newest_launched = 0
        self._newest_completed = 0

    @property
    def num_grants(self) -> int:
        """Grants that are not released; 0 when nothing is swapped out, or something has leaked."""
        return len(self._grants)

    @property
    def num_free(self) -> tuple[int, int]:
        """In host memory and on disk."""
        return len(self._free[SwapPlace.HOST]), len(self._free[SwapPlace.DISK])

    @property
    def num_used(self) -> tuple[int, int]:
        """In host memory and on disk."""
        host, disk = self.num_free
        return len(self._ids[SwapPlace.HOST]) - host, len(self._ids[SwapPlace.DISK]) - disk

    def place_for(self, num_blocks: int) -> SwapPlace | None:
        """The fastest kind with so many free blocks, or None."""
        return next((p for p in SwapPlace if len(self._free[p]) >= num_blocks), None)

    def take(self, place: SwapPlace, num_blocks: int) -> SwapGrant:
        """Raises ValueError when there are not so many, or none are asked for."""
        free = self._free[place]
        if not 0 < num_blocks <= len(free):
            raise ValueError(f"{num_blocks} of {len(free)} free swap blocks cannot be taken")
        # The lowest ids: so runs stay together and are moved in few copies.
        grant = SwapGrant(place, tuple(free[:num_blocks]))
        del free[:num_blocks]
        self._grants.add(grant)
        return grant

    def release(self, grant: SwapGrant) -> None:
        """Gives blocks up. Raises RuntimeError for a grant that is not owned (any more)."""
        if grant not in self._grants:
            raise RuntimeError("this swap grant was released before")
        self._grants.remove(grant)
        if self._newest_launched > self._newest_completed:
            self._deferred.append((self._newest_launched, grant))
        else:
            self._return(grant)

    def launched(self, step: int) -> None:
        """A step that may touch all blocks owned so far starts. Numbers only grow."""
        self._newest_launched = step

    def completed(self, step: int) -> None:
        """This step, and so every one before it, touches no block any more."""
        self._newest_completed = step
        while self._deferred and self._deferred[0][0] <= step:
            self._return(self._deferred.popleft()[1])

    def check(self) -> None:
        """Raises InvariantBroken unless every block is free, owned or deferred, exactly once."""
        held = [*self._grants, *(grant for _, grant in self._deferred)]
        for place, ids in self._ids.items():
            found = Counter(self._free[place])
            for grant in held:
                if grant.place is place:
                    found.update(grant.blocks)
            if found != Counter(ids):
                raise InvariantBroken(f"blocks of {place.value} swap memory are miscounted")

    def _return(self, grant: SwapGrant) -> None:
        self._free[grant.place] = sorted((*self._free[grant.place], *grant.blocks))
