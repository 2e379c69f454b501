"""The KV transport over NIXL and UCX; knows nothing of hand-overs.

The agent sees the slot ring and nothing else. Facts it is built around: a transfer cannot be timed
out or aborted, so handles are released only once they are decided; a peer that was killed shows up
as an exception or as "ERR", a frozen one not at all; the agent is not thread-safe, so one thread
makes all calls; its pickle-based helpers are never used, metadata travels as the bytes NIXL makes.

UCX picks its own ways (`UCX_TLS`): between processes of one machine shared memory, where a read is
done when `post` returns. UCX checks no address ranges on software transports, so the network that
carries them has to be trusted or isolated.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from baton.core.handover_messages import RingDescription
from baton.kv.slots import SlotRing
from baton.kv.transport import ReadState, TransportError, check_range

_STATES = {"PROC": ReadState.RUNNING, "DONE": ReadState.DONE, "ERR": ReadState.FAILED}


def available() -> bool:
    """Whether NIXL is installed. Loads nothing."""
    return importlib.util.find_spec("nixl") is not None


class _Read:
    """A posted read. state: the last one seen; decided ones are not asked again."""

    __slots__ = ("handle", "state")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.state = ReadState.RUNNING


class NixlTransport:
    """See the port `baton.kv.transport.KvTransport`."""

    name = "nixl"

    def __init__(self, ring: SlotRing, incarnation: str) -> None:
        """Starts an agent named after our incarnation. Raises TransportError when NIXL cannot."""
        self._ring = ring
        self._peers: dict[str, RingDescription] = {}
        # NIXL and UCX log to standard output and error from the moment they are loaded.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(enable_listen_thread=False, backends=["UCX"])
            self._agent: Any = nixl_agent(incarnation, config)
            size = ring.num_slots * ring.slot_bytes
            self._region: Any = self._agent.register_memory(
                [(ring.base_address, size, 0, "")], "DRAM"
            )
        except Exception as error:
            raise TransportError("NIXL could not be started") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, peer: str, metadata: bytes, ring: RingDescription) -> None:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError("the peer's metadata was refused") from error
        if (name.decode() if isinstance(name, bytes) else name) != peer:
            self._disconnect(name)
            raise TransportError("the metadata is another peer's")
        self._peers[peer] = ring

    def remove_peer(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            self._disconnect(peer)

    def post(self, peer: str, remote_slot: int, local_slot: int, num_bytes: int) -> object:
        ring = self._peers.get(peer)
        if ring is None:
            raise TransportError("unknown peer")
        ours = self._ring.describe()
        check_range(ring, remote_slot, ours, local_slot, num_bytes)
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._descriptor(ours, local_slot, num_bytes),
                self._descriptor(ring, remote_slot, num_bytes),
                peer,
            )
        except Exception as error:
            raise TransportError("the read could not be prepared") from error
        read = _Read(handle)
        try:
            read.state = _STATES[self._agent.transfer(handle)]
        except Exception:
            read.state = ReadState.FAILED
        return read

    def poll(self, handle: object) -> ReadState:
        assert isinstance(handle, _Read)
        if handle.state is ReadState.RUNNING:
            try:
                handle.state = _STATES[self._agent.check_xfer_state(handle.handle)]
            except Exception:
                handle.state = ReadState.FAILED
        return handle.state

    def release(self, handle: object) -> None:
        assert isinstance(handle, _Read) and handle.state is not ReadState.RUNNING
        try:
            self._agent.release_xfer_handle(handle.handle)
        except Exception as error:
            raise TransportError("the read still holds its memory") from error

    def close(self) -> None:
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._agent.deregister_memory(self._region)
        self._agent = self._region = None

    def _descriptor(self, ring: RingDescription, slot: int, num_bytes: int) -> Any:
        address = ring.base_address + slot * ring.slot_bytes
        return self._agent.get_xfer_descs([(address, num_bytes, ring.device_id)], ring.memory_kind)

    def _disconnect(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception:
            # The peer is gone already; there is nothing left to disconnect.
            return
