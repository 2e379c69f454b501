"""The parts that a hand-over is made of, each timed alone: pack, seal, verify, unpack."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from statistics import median

from baton.core.handover.table import KvChunkRange
from baton.core.kvcache.block_pool import Extents
from baton.core.request.model import KvLayout
from baton.engine.kv.cache import KvCache
from baton.transfer.kv_chunk import DIGEST_BYTES, HEADER_BYTES, XXH3, Sealer, positions_per_kv_chunk
from baton.transfer.staging import StagingPool
from baton_loadtest.bench.kv_ends import NO_DIGEST

BLOCK_SIZE = 16
ROUNDS = 7
MEGABYTE = 1_000_000
SECRET = bytes(range(16))

Measure = Callable[[], Awaitable[float]]


def positions_of(megabytes: float, layout: KvLayout) -> int:
    """As many whole positions as so many megabytes hold, at least one."""
    return max(1, int(megabytes * MEGABYTE) // layout.bytes_per_position)


def runs(positions: int, buffer_bytes: int, layout: KvLayout) -> list[KvChunkRange]:
    """The KV chunks that so many positions make."""
    each = positions_per_kv_chunk(buffer_bytes, layout)
    return [
        KvChunkRange(index, first, min(each, positions - first))
        for index, first in enumerate(range(0, positions, each))
    ]


def memory(layout: KvLayout, positions: int) -> tuple[KvCache, Extents]:
    """KV memory for so many positions in one run of blocks, every page of it written."""
    import torch

    torch.set_num_threads(1)
    blocks = -(-positions // BLOCK_SIZE)
    cache = KvCache(layout, blocks, BLOCK_SIZE, torch.device("cpu"))
    for tensor in (cache.keys, cache.values):
        tensor.normal_()
    return cache, ((0, blocks),)


def use(digest: str) -> str:
    """The digest that KV chunks of this process are to be sealed with; NO_DIGEST makes all of them
    zeros for good, which is how the cost of a digest shows and nothing that can be served with."""
    if digest != NO_DIGEST:
        return digest
    setattr(Sealer, "_digest_of", lambda *_: bytes(DIGEST_BYTES))  # noqa: B010  # a method
    return XXH3


async def medians(cases: dict[str, Measure], rounds: int = ROUNDS) -> dict[str, float]:
    """The median seconds of each case; cases take turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, measure in cases.items():
            seconds = await measure()
            if number:
                times[name].append(seconds)
    return {name: median(found) for name, found in times.items()}


class Parts:
    """Copies KV through one buffer, KV chunk by KV chunk: what one part wrote the next one finds
    where a hand-over would find it."""

    def __init__(self, layout: KvLayout, positions: int, buffer_bytes: int, digest: str) -> None:
        self._layout, self._buffer_bytes = layout, buffer_bytes
        self._given, self._extents = memory(layout, positions)
        self._taken, _ = memory(layout, positions)
        self._ring = StagingPool(2, buffer_bytes)
        self._sealer = Sealer(SECRET, "ab" * 16, layout, digest)

    def spent(self, positions: int) -> dict[str, float]:
        """Median seconds of each part over all KV chunks of so many positions."""
        found: dict[str, list[float]] = {"pack": [], "seal": [], "verify": [], "unpack": []}
        for number in range(ROUNDS + 1):
            for name, seconds in self._once(positions).items():
                if number:
                    found[name].append(seconds)
        return {name: median(times) for name, times in found.items()}

    def _once(self, positions: int) -> dict[str, float]:
        view = self._ring.view(0)
        spent = dict.fromkeys(("pack", "seal", "verify", "unpack"), 0.0)
        for run in runs(positions, self._buffer_bytes, self._layout):
            header = self._sealer.header(run)
            payload = view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
            place = (self._extents, run.first_position, run.num_positions, payload)
            times = [time.perf_counter()]
            self._given.pack(*place)
            times.append(time.perf_counter())
            self._sealer.seal(header, view)
            times.append(time.perf_counter())
            wrong = self._sealer.mismatch(header, view)
            times.append(time.perf_counter())
            self._taken.unpack(*place)
            times.append(time.perf_counter())
            assert not wrong
            for name, began, ended in zip(spent, times, times[1:], strict=False):
                spent[name] += ended - began
        return spent
