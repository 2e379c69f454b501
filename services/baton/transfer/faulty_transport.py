"""A KV transport whose reads go wrong at the point `transport.read`; knows nothing of hand-overs.

It can tell a read as done late or never, read only half of it, or read another buffer, as through a
reference that is out of date. What it never does is release a read that the transport below has not
decided: it goes wrong as a transport may, within the port's contract.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.handover.messages import StagingPoolDescription
from baton.transfer.fault_spec import Kind
from baton.transfer.faults import TRANSPORT_READ
from baton.transfer.transport import KvTransport, ReadState

if TYPE_CHECKING:
    from baton.transfer.injector import Injector

LEFT_OUT = 16
"""Bytes that a truncated read lacks at least: fewer could be there from before by chance."""


@dataclass(frozen=True, slots=True)
class _Read:
    """hidden_until: on the monotonic clock; before it the read counts as running."""

    handle: object
    hidden_until: float


class FaultyTransport:
    """See the port `baton.transfer.transport.KvTransport`."""

    def __init__(self, inner: KvTransport, faults: Injector) -> None:
        self._inner, self._faults = inner, faults
        self._num_buffers: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, peer: str, metadata: bytes, ring: StagingPoolDescription) -> None:
        self._inner.add_peer(peer, metadata, ring)
        self._num_buffers[peer] = ring.num_buffers

    def remove_peer(self, peer: str) -> None:
        self._inner.remove_peer(peer)

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        hidden_until = -math.inf
        due = self._faults.due(TRANSPORT_READ)
        for rule, draw in due:
            match rule.kind:
                case Kind.TRUNCATE if num_bytes > LEFT_OUT:
                    num_bytes = draw.randint(1, num_bytes - LEFT_OUT)
                case Kind.SWAP if peer in self._num_buffers:
                    remote_buffer = (remote_buffer + 1) % self._num_buffers[peer]
                case Kind.DELAY | Kind.DROP:
                    hidden_until = time.monotonic() + rule.seconds
                case _:
                    continue
            self._faults.happened(rule)
        handle = self._inner.post(peer, remote_buffer, local_buffer, num_bytes)
        for rule, _ in due:
            self._faults.stop_here(rule)
        return _Read(handle, hidden_until)

    def poll(self, handle: object) -> ReadState:
        assert isinstance(handle, _Read)
        if time.monotonic() < handle.hidden_until:
            return ReadState.RUNNING
        return self._inner.poll(handle.handle)

    def release(self, handle: object) -> None:
        assert isinstance(handle, _Read)
        self._inner.release(handle.handle)

    def close(self) -> None:
        self._inner.close()
