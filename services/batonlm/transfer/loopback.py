"""The KV transport without NIXL, between processes of one machine.

A ring's memory is an anonymous file (memfd). A peer opens it through /proc/<pid>/fd and maps it
read-only; a read is a copy. The file is sealed against shrinking, so a mapped peer that misbehaves
or dies can make us read stale bytes (which the KV chunk's digest finds) but never fault. Nothing is
left behind by a killed process: the file lives as long as someone maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

import numpy as np

from batonlm.transfer.staging import (
    HostMemory,
    ReadState,
    StagingPool,
    TransportError,
    check_range,
)
from batonlm.v1 import handover_pb2 as pb

_METADATA = struct.Struct("<36sQQQQ")
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class LoopbackTransport:
    """See the port `batonlm.transfer.staging.KvTransport`."""

    name = "loopback"

    def __init__(self, ring: StagingPool) -> None:
        """Raises TransportError for buffers that are not in the host's memory."""
        if not isinstance(ring.memory, HostMemory):
            raise TransportError("loopback needs buffers in the host's memory")
        self._ring, self._fd = ring, ring.memory.fd
        self._peers: dict[str, tuple[pb.StagingPoolDescription, mmap.mmap]] = {}

    def metadata(self) -> bytes:
        file = os.fstat(self._fd)
        return _METADATA.pack(*_machine(), os.getpid(), self._fd, file.st_ino)

    def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        try:
            boot_id, namespace, pid, fd, inode = _METADATA.unpack(metadata)
        except struct.error:
            raise TransportError("the metadata is not loopback's") from None
        if (boot_id, namespace) != _machine():
            raise TransportError("the peer is on another machine or in another container")
        memory = _map(f"/proc/{pid}/fd/{fd}", inode, ring.num_buffers * ring.buffer_bytes)
        self.remove_peer(peer)
        self._peers[peer] = ring, memory

    def remove_peer(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.pop(peer)[1].close()

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        if peer not in self._peers:
            raise TransportError("unknown peer")
        ring, memory = self._peers[peer]
        check_range(ring, remote_buffer, self._ring.describe(), local_buffer, num_bytes)
        # numpy copies without the GIL, memoryview would hold it for the whole KV chunk.
        source: _Bytes = np.frombuffer(
            memory, np.uint8, num_bytes, remote_buffer * ring.buffer_bytes
        )
        target: _Bytes = np.frombuffer(self._ring.view(local_buffer), np.uint8, num_bytes)
        np.copyto(target, source)
        return None

    def poll(self, handle: object) -> ReadState:
        return ReadState.DONE

    def release(self, handle: object) -> None:
        pass

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)


def _map(path: str, inode: int, size: int) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise TransportError("the peer's memory cannot be opened") from None
    try:
        file = os.fstat(fd)
        if file.st_ino != inode or file.st_size != size:
            raise TransportError("the peer's memory is not what it described")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportError("the peer's memory could shrink under us")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except OSError:
        raise TransportError("the peer's memory cannot be mapped") from None
    finally:
        os.close(fd)


def _machine() -> tuple[bytes, int]:
    """What must be equal for two processes to see each other's /proc: boot and pid namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().encode()
    return boot_id, os.stat("/proc/self/ns/pid").st_ino
