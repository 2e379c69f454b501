"""Memory that processes of one machine share: a file without a name, or memory of a GPU.

The file (memfd) is another process's, found through /proc/<pid>/fd, and is gone when the last one
that maps it is, however that one ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

import msgspec

from batonlm.core.errors import Internal


class GpuMemory(msgspec.Struct, frozen=True, tag=True):
    """Memory of a GPU of this machine, which the worker owns: see `batonlm.engine.cuda`."""

    handle: bytes
    num_bytes: int
    rank: int
    """Whose GPU it is."""


class MemoryFile(msgspec.Struct, frozen=True, tag=True):
    """Where the file is, and which one it must be: a descriptor may be another file's by now."""

    pid: int
    fd: int
    inode: int
    size: int

    @classmethod
    def of(cls, fd: int) -> MemoryFile:
        """A file of this process."""
        found = os.fstat(fd)
        return cls(os.getpid(), fd, found.st_ino, found.st_size)

    def map(self) -> mmap.mmap:
        """The file's memory, to read and write. Raises Internal when it is not there."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise Internal("shared memory cannot be opened") from None
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (self.inode, self.size):
                raise Internal("shared memory is not what was described")
            return mmap.mmap(fd, self.size)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """`nbytes` bytes of a file, or of a GPU's memory, from `offset` on. It is a KvPayload where the
    worker itself cannot reach the memory."""

    file: MemoryFile | GpuMemory
    offset: int
    nbytes: int

    def __getitem__(self, part: slice) -> SharedPlace:
        start, stop, _ = part.indices(self.nbytes)
        return SharedPlace(self.file, self.offset + start, stop - start)


@dataclass(frozen=True, slots=True)
class Region:
    """A file that this process has mapped at `address`."""

    file: MemoryFile
    address: int

    def find(self, part: memoryview) -> SharedPlace | None:
        """Where a part of it is; None for other memory, and for a view that may not be written."""
        if part.readonly or not part.contiguous or not part.nbytes:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(part)) - self.address
        if not 0 <= offset <= self.file.size - part.nbytes:
            return None
        return SharedPlace(self.file, offset, part.nbytes)


class Scratch:
    """Shared memory of our own, for payloads that lie in none. Grows as needed."""

    def __init__(self) -> None:
        self._fd = -1
        self._memory: mmap.mmap | None = None

    def room(self, size: int) -> tuple[SharedPlace, memoryview]:
        """A place of `size` bytes and its memory. Good until the next call."""
        if self._memory is None or len(self._memory) < size:
            self.close()
            self._fd = os.memfd_create("baton-scratch", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
            self._memory = mmap.mmap(self._fd, size)
        return SharedPlace(MemoryFile.of(self._fd), 0, size), memoryview(self._memory)[:size]

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        # The mapping goes with the last view of it.
        self._fd, self._memory = -1, None
