"""KV whose every byte is known, and a pool to put it in that shows what else was written.

A hash stands for a model's KV: what lies at a position follows from the hand-over's id and the
position, so that bytes of another hand-over, position or time are never right by chance.
"""

from __future__ import annotations

import hashlib

import numpy as np

from baton.core.request.model import KvLayout

CANARY = 0xEE
HEADS, HEAD_SIZE = 2, 8


def layout(layers: int) -> KvLayout:
    """128 bytes per position and layer."""
    return KvLayout("ab" * 32, "float32", layers, HEADS, HEAD_SIZE, HEAD_SIZE)


def kv_of(handover_id: bytes, position: int, size: int) -> bytes:
    """The KV of one position of one hand-over."""
    return hashlib.shake_128(handover_id + position.to_bytes(4, "little")).digest(size)


class Pool:
    """Stands for an engine's blocks: room for one input, and as much around it for nobody."""

    def __init__(self, positions: int, bytes_per_position: int) -> None:
        self._size, self._margin = bytes_per_position, positions * bytes_per_position
        self._clean = bytes([CANARY]) * (3 * self._margin)
        self._memory = bytearray(self._clean)
        self._unpacked: set[int] = set()

    async def unpack(self, first_position: int, count: int, payload: memoryview) -> None:
        start = self._margin + first_position * self._size
        self._memory[start : start + count * self._size] = payload
        self._unpacked.update(range(first_position, first_position + count))

    @property
    def num_unpacked(self) -> int:
        return len(self._unpacked)

    def num_wrong(self, handover_id: bytes) -> int:
        """Positions that were unpacked and do not hold what they must."""
        return sum(
            self._at(position) != kv_of(handover_id, position, self._size)
            for position in self._unpacked
        )

    def num_changed(self) -> int:
        """Bytes that nobody unpacked and that are not what they were."""
        left = bytearray(self._memory)
        for position in self._unpacked:
            start = self._margin + position * self._size
            left[start : start + self._size] = self._clean[: self._size]
        return differing(left, self._clean)

    def contents(self) -> bytes:
        """All of it, as it is now."""
        return bytes(self._memory)

    def clear(self) -> None:
        """Only when nothing unpacks."""
        self._memory[:] = self._clean
        self._unpacked.clear()

    def _at(self, position: int) -> bytes:
        start = self._margin + position * self._size
        return bytes(self._memory[start : start + self._size])


def differing(one: bytes | bytearray | memoryview, other: bytes | bytearray | memoryview) -> int:
    """How many bytes differ."""
    return int(np.count_nonzero(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)))
