"""The KV transport over NIXL and UCX.

The agent is given the staging pool and nothing else. It is built around these facts: a transfer
cannot be timed out or aborted, so a handle is released only once its transfer has ended; a peer
that was killed shows up as an exception or as an error status, a frozen one not at all; an agent is
not thread-safe, so one thread makes all calls.

NIXL's bindings are used without the Python class on top of them, for two reasons. That class fixes
the progress thread's delay at 0, which makes the thread spin: a whole core per idle process, and
reads over TCP 16 times slower on a busy machine of two cores. With a delay the thread sleeps until
UCX has an event. And that class's handles release themselves when they are collected as garbage,
decided or not.

UCX picks its transports among those that `batonlm.transfer.ucx` allows: between processes of one
machine shared memory, where a read is done when `post` returns.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from batonlm.transfer.staging import (
    ReadState,
    StagingPool,
    TransportError,
    check_range,
    place_of,
)
from batonlm.transfer.ucx import Ucx
from batonlm.v1 import handover_pb2 as pb

PROGRESS_DELAY_US = 100_000


def available() -> bool:
    """Whether NIXL is installed. Loads nothing."""
    return importlib.util.find_spec("nixl") is not None


class _Read:
    """A posted read, and the last state seen; a read that has ended is not polled again."""

    __slots__ = ("handle", "state")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.state = ReadState.RUNNING


class NixlTransport:
    """See the port `batonlm.transfer.staging.KvTransport`."""

    name = "nixl"

    def __init__(self, ring: StagingPool, instance_id: str, ucx: Ucx) -> None:
        """Starts an agent named after our instance id. Raises TransportError when NIXL cannot."""
        self._ring, self._instance_id = ring, instance_id
        self._peers: dict[str, pb.StagingPoolDescription] = {}
        ucx.apply()
        try:
            # Importing the package puts the bindings that fit this machine in their place.
            importlib.import_module("nixl")
            self._nixl: Any = importlib.import_module("nixl._bindings")
            self._states = {
                self._nixl.NIXL_SUCCESS: ReadState.DONE,
                self._nixl.NIXL_IN_PROG: ReadState.RUNNING,
            }
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_DELAY_US
            config.useListenThread = False
            config.captureTelemetry = False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            self._agent: Any = self._nixl.nixlAgent(instance_id, config)
            self._agent.createBackend("UCX", {"ucx_error_handling_mode": ucx.error_handling})
            memory = ring.memory
            self._region: Any = self._nixl.nixlRegDList(
                self._segment(memory.kind), [(*region, "") for region in memory.regions]
            )
            self._agent.registerMem(self._region, [])
        except Exception as error:
            raise TransportError("NIXL could not be started") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        if peer == self._instance_id:
            # An agent knows its own memory since it was registered.
            self._peers[peer] = ring
            return
        try:
            name: str = self._agent.loadRemoteMD(metadata).decode()
        except Exception as error:
            raise TransportError("the peer's metadata was refused") from error
        if name != peer:
            self._disconnect(name)
            raise TransportError("the metadata is another peer's")
        self._peers[peer] = ring

    def remove_peer(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None and peer != self._instance_id:
            self._disconnect(peer)

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        ring = self._peers.get(peer)
        if ring is None:
            raise TransportError("unknown peer")
        ours = self._ring.describe()
        check_range(ring, remote_buffer, ours, local_buffer, num_bytes)
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._descriptor(ours, local_buffer, num_bytes),
                self._descriptor(ring, remote_buffer, num_bytes),
                peer,
                b"",
                [],
            )
        except Exception as error:
            raise TransportError("the read could not be prepared") from error
        read = _Read(handle)
        self._update(read, lambda: self._agent.postXferReq(handle, b""))
        return read

    def poll(self, handle: object) -> ReadState:
        assert isinstance(handle, _Read)
        if handle.state is ReadState.RUNNING:
            self._update(handle, lambda: self._agent.getXferStatus(handle.handle))
        return handle.state

    def release(self, handle: object) -> None:
        assert isinstance(handle, _Read) and handle.state is not ReadState.RUNNING
        try:
            status = self._agent.releaseXferReq(handle.handle)
        except Exception as error:
            raise TransportError("the read still holds its memory") from error
        if status != self._nixl.NIXL_SUCCESS:
            raise TransportError("the read still holds its memory")

    def close(self) -> None:
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._agent.deregisterMem(self._region, [])
        self._agent = self._region = None

    def _update(self, read: _Read, ask: Callable[[], Any]) -> None:
        """With some transports of UCX a peer's death is a status, with others an exception."""
        try:
            read.state = self._states.get(ask(), ReadState.FAILED)
        except Exception:
            read.state = ReadState.FAILED

    def _descriptor(self, ring: pb.StagingPoolDescription, buffer: int, num_bytes: int) -> Any:
        address, device_id = place_of(ring, buffer)
        return self._nixl.nixlXferDList(
            self._segment(ring.memory_kind), [(address, num_bytes, device_id)]
        )

    def _segment(self, kind: str) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG

    def _disconnect(self, name: str) -> None:
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception:
            # The peer is gone already; there is nothing left to disconnect.
            return
