"""Swap memory, where KV of preempted sequences waits: in host memory or in a file.

Blocks move whole and raw, as the pool stores them: only this runner reads them, so nothing is
permuted, and what a block holds after its last written place comes back too.

The file is read and written by calls, not mapped, because a disk that fails under a mapping kills
the process. With calls a failure costs only what lay there: every block is sealed with a digest
when it is written, and a block that does not read back as it was written is reported as lost.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import torch
import xxhash

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import BlockSwap, StepPlan
from batonlm.engine.device import settle
from batonlm.engine.kv.cache import KvMemory
from batonlm.engine.kv.extents import Moved, joined, owners

log = logging.getLogger(__name__)

_STAGING_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of the pool, and as many consecutive rows of a store."""

    block: int
    row: int
    count: int


class HostStore:
    """num_rows blocks in host memory, pinned where the pool is on a GPU."""

    def __init__(self, blocks: KvMemory, num_rows: int):
        self._blocks = blocks
        self._rows = torch.empty(
            num_rows,
            blocks.block_bytes,
            dtype=torch.uint8,
            pin_memory=num_rows > 0 and blocks.device.type == "cuda",
        )

    def put(self, run: BlockRun) -> None:
        self._blocks.blocks_out(run.block, run.count, self._rows.narrow(0, run.row, run.count))

    def get(self, run: BlockRun) -> Iterator[int]:
        """Yields nothing: host memory loses no block."""
        self._blocks.blocks_in(run.block, run.count, self._rows.narrow(0, run.row, run.count))
        return iter(())

    def close(self) -> None:
        self._rows = torch.empty(0, self._blocks.block_bytes, dtype=torch.uint8)


class FileStore:
    """num_rows blocks in a file without a name, all of it allocated when made.

    Raises InvalidArgument naming swap_disk_bytes or swap_folder when the file cannot be had.
    """

    def __init__(self, blocks: KvMemory, num_rows: int, folder: str):
        self._blocks = blocks
        self._row_bytes = blocks.block_bytes
        self._file = _allocated(num_rows * self._row_bytes, folder)
        self._staged_rows = max(1, min(num_rows, _STAGING_BYTES // self._row_bytes))
        self._staging = bytearray(self._staged_rows * self._row_bytes)
        self._digests: dict[int, int] = {}

    def put(self, run: BlockRun) -> None:
        for part in self._parts(run):
            rows = range(part.row, part.row + part.count)
            self._blocks.blocks_out(part.block, part.count, self._tensor(part.count))
            settle(self._blocks.device)
            for row in rows:
                self._digests.pop(row, None)
            try:
                self._transfer(os.pwritev, part)
            except OSError as error:
                log.error("%d blocks could not be swapped out to disk: %s", part.count, error)
            else:
                self._digests.update(zip(rows, self._staged_digests(part.count), strict=True))

    def get(self, run: BlockRun) -> Iterator[int]:
        """Puts what reads back as it was written; yields the blocks that did not come back."""
        for part in self._parts(run):
            try:
                self._transfer(os.preadv, part)
            except OSError as error:
                log.error("%d blocks could not be swapped in from disk: %s", part.count, error)
                yield from range(part.block, part.block + part.count)
                continue
            self._blocks.blocks_in(part.block, part.count, self._tensor(part.count))
            # Before the next part overwrites what is still being copied.
            settle(self._blocks.device)
            for i, digest in enumerate(self._staged_digests(part.count)):
                if self._digests.get(part.row + i) != digest:
                    log.error("a block of swap memory on disk is not what was written there")
                    yield part.block + i

    def close(self) -> None:
        self._file.close()

    def _parts(self, run: BlockRun) -> Iterator[BlockRun]:
        """Cut to what the staging memory holds."""
        for done in range(0, run.count, self._staged_rows):
            count = min(self._staged_rows, run.count - done)
            yield BlockRun(run.block + done, run.row + done, count)

    def _tensor(self, count: int) -> torch.Tensor:
        return torch.frombuffer(self._staging, dtype=torch.uint8).view(-1, self._row_bytes)[:count]

    def _staged_digests(self, count: int) -> Iterator[int]:
        view, size = memoryview(self._staging), self._row_bytes
        return (xxhash.xxh3_64_intdigest(view[i * size : (i + 1) * size]) for i in range(count))

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], part: BlockRun) -> None:
        """Reads or writes staging memory in as many calls as it takes."""
        view = memoryview(self._staging)[: part.count * self._row_bytes]
        offset = part.row * self._row_bytes
        while view:
            done = call(self._file.fileno(), [view], offset)
            if not done:
                raise OSError(errno.EIO, "the swap file is cut short")
            view, offset = view[done:], offset + done


def _allocated(num_bytes: int, folder: str) -> IO[bytes]:
    place = folder or tempfile.gettempdir()
    try:
        file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise InvalidArgument(
            f"no swap file can be made in {place}: {error.strerror}", field="swap_folder"
        ) from error
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        file.close()
        raise InvalidArgument(
            f"{place} has no room for {num_bytes} bytes of swap memory: {error.strerror}",
            field="swap_disk_bytes",
        ) from error
    return file


class SwapMemory:
    """Blocks of swap memory count from 0: first those in host memory, then those in a file.

    host_bytes, disk_bytes: how much at most, in whole blocks; 0 is none. folder: where the file is
    made, "" is the system's folder for temporary files. Raises InvalidArgument, with the field, for
    what cannot be had.
    """

    def __init__(
        self, blocks: KvMemory, *, host_bytes: int = 0, disk_bytes: int = 0, folder: str = ""
    ):
        self._device = blocks.device
        num_host = _whole_blocks(host_bytes, blocks.block_bytes, "swap_host_bytes")
        num_disk = _whole_blocks(disk_bytes, blocks.block_bytes, "swap_disk_bytes")
        self.num_blocks = num_host, num_disk
        self._host = HostStore(blocks, num_host)
        self._disk = FileStore(blocks, num_disk, folder) if num_disk else None

    @torch.inference_mode()
    def move(self, plan: StepPlan) -> Moved:
        """Swaps a plan's blocks out, then in; to be called before the rest of the plan is done.

        A disk that fails costs the sequences of this plan whose blocks it does not give back.
        """
        if not plan.swap_out and not plan.swap_in:
            return Moved()
        # On a GPU this waits for the steps before, so that only the moving is timed.
        settle(self._device)
        began = time.perf_counter()
        for store, run in self._runs(plan.swap_out):
            store.put(run)
        missing = {b for store, run in self._runs(plan.swap_in) for b in store.get(run)}
        settle(self._device)
        return Moved(time.perf_counter() - began, owners(plan, missing))

    def close(self) -> None:
        """Gives memory and file back. Idempotent."""
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _runs(self, swaps: Iterable[BlockSwap]) -> Iterator[tuple[HostStore | FileStore, BlockRun]]:
        """Neighbours move together, as far as they are neighbours on both sides."""
        num_host = self.num_blocks[0]
        for block, stored, count in joined(swaps, num_host):
            if self._disk is not None and stored >= num_host:
                yield self._disk, BlockRun(block, stored - num_host, count)
            else:
                yield self._host, BlockRun(block, stored, count)


def _whole_blocks(num_bytes: int, block_bytes: int, field: str) -> int:
    if 0 < num_bytes < block_bytes:
        raise InvalidArgument(
            f"{num_bytes} bytes hold no block: one takes {block_bytes}", field=field
        )
    return num_bytes // block_bytes
