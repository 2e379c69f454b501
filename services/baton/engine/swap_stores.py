"""Where swapped blocks lie: in host memory or in a file.

The file is read and written by calls, not mapped, because a disk that fails under a mapping kills
the process. With calls it costs only what lay there: every block is sealed with a digest when it is
written, and one that does not read back as it was written does not come back.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Protocol

import torch
import xxhash

from baton.core.errors import InvalidArgument

log = logging.getLogger(__name__)

_STAGING_BYTES = 4 * 1024 * 1024


class WholeBlocks(Protocol):
    """A block pool's memory, from which whole blocks are taken raw and put back.

    out and raw: uint8 [count, block_bytes] on the host, rows in the order of the blocks; what a row
    means is the pool's own affair. On a GPU, copies may be left to the current stream.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def block_bytes(self) -> int: ...

    def blocks_out(self, first: int, count: int, out: torch.Tensor) -> None: ...

    def blocks_in(self, first: int, count: int, raw: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of the pool, and as many consecutive rows of a store."""

    block: int
    row: int
    count: int


class HostStore:
    """num_rows blocks in host memory, pinned where the pool is on a GPU."""

    def __init__(self, blocks: WholeBlocks, num_rows: int):
        self._blocks = blocks
        self._rows = torch.empty(
            num_rows,
            blocks.block_bytes,
            dtype=torch.uint8,
            pin_memory=num_rows > 0 and blocks.device.type == "cuda",
        )

    def put(self, run: Run) -> None:
        self._blocks.blocks_out(run.block, run.count, self._rows.narrow(0, run.row, run.count))

    def get(self, run: Run) -> Iterator[int]:
        """Yields nothing: host memory loses no block."""
        self._blocks.blocks_in(run.block, run.count, self._rows.narrow(0, run.row, run.count))
        return iter(())

    def close(self) -> None:
        self._rows = torch.empty(0, self._blocks.block_bytes, dtype=torch.uint8)


class FileStore:
    """num_rows blocks in a file without a name, all of it allocated when made.

    Raises InvalidArgument naming swap_disk_bytes or swap_folder when the file cannot be had.
    """

    def __init__(self, blocks: WholeBlocks, num_rows: int, folder: str):
        self._blocks = blocks
        self._row_bytes = blocks.block_bytes
        self._file = _allocated(num_rows * self._row_bytes, folder)
        self._staged_rows = max(1, min(num_rows, _STAGING_BYTES // self._row_bytes))
        self._staging = bytearray(self._staged_rows * self._row_bytes)
        self._digests: dict[int, int] = {}

    def put(self, run: Run) -> None:
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

    def get(self, run: Run) -> Iterator[int]:
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

    def _parts(self, run: Run) -> Iterator[Run]:
        """Cut to what the staging memory holds."""
        for done in range(0, run.count, self._staged_rows):
            count = min(self._staged_rows, run.count - done)
            yield Run(run.block + done, run.row + done, count)

    def _tensor(self, count: int) -> torch.Tensor:
        return torch.frombuffer(self._staging, dtype=torch.uint8).view(-1, self._row_bytes)[:count]

    def _staged_digests(self, count: int) -> Iterator[int]:
        view, size = memoryview(self._staging), self._row_bytes
        return (xxhash.xxh3_64_intdigest(view[i * size : (i + 1) * size]) for i in range(count))

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], part: Run) -> None:
        """Reads or writes staging memory in as many calls as it takes."""
        view = memoryview(self._staging)[: part.count * self._row_bytes]
        offset = part.row * self._row_bytes
        while view:
            done = call(self._file.fileno(), [view], offset)
            if not done:
                raise OSError(errno.EIO, "the swap file is cut short")
            view, offset = view[done:], offset + done


def settle(device: torch.device) -> None:
    """Waits until the current stream's copies are done; on CPU they always are."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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
