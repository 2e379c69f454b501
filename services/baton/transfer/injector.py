"""Makes things go wrong at the points of a hand-over, by rules and a seed; see `fault_spec`.

Knows no more of hand-overs than the port `baton.transfer.faults.Faults` tells. A process that
freezes itself is thawed by somebody else (SIGCONT).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from baton.core.handover.messages import (
    Failed,
    KvChunkHeader,
    KvChunkReady,
    StagingPoolDescription,
    Tokens,
)
from baton.transfer.fault_spec import FaultSpec, Kind, Rule
from baton.transfer.faults import MESSAGES, TRANSPORT_READ, Faults, In, Out
from baton.transfer.kv_chunk import HEADER_BYTES
from baton.transfer.transport import KvTransport, ReadState

# A KV transport whose reads go wrong at the point `transport.read`.
#
# It can tell a read as done late or never, read only half of it, or read another buffer, as through
# a reference that is out of date. What it never does is release a read that the transport below has
# not decided: it goes wrong as a transport may, within the port's contract.

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


# Ways to damage a KV chunk, in its buffer or in what is told of it; decides nothing about when.
#
# Every function returns whether it changed anything: what changed nothing is no fault.

# Where fields of the binary header lie; see baton.transfer.kv_chunk.
_INSTANCE_ID, _LAYOUT, _LENGTH = slice(8, 24), slice(68, 76), slice(76, 84)

KEPT = 8


class Damage:
    """Damages KV chunks of one sender or receiver. Keeps a few old ones, to bring them back."""

    def __init__(self) -> None:
        self._kv_chunks: deque[bytes] = deque(maxlen=KEPT)
        self._headers: deque[KvChunkHeader] = deque(maxlen=KEPT)

    def keep(self, kv_chunk: memoryview) -> None:
        self._kv_chunks.append(bytes(kv_chunk))

    def keep_told(self, told: KvChunkReady) -> None:
        self._headers.append(told.header)

    def in_buffer(self, kind: Kind, part: str, kv_chunk: memoryview, draw: random.Random) -> bool:
        """KV chunk: header and payload as they lie in a buffer."""
        before = bytes(kv_chunk)
        match kind:
            case Kind.CORRUPT:
                _flip(kv_chunk, _part(part, kv_chunk), draw)
            case Kind.STALE:
                kv_chunk[_INSTANCE_ID] = draw.randbytes(16)
            case Kind.LAYOUT:
                kv_chunk[_LAYOUT] = draw.randbytes(8)
            case Kind.LENGTH:
                length = int.from_bytes(kv_chunk[_LENGTH], "little")
                kv_chunk[_LENGTH] = draw.randrange(1, length).to_bytes(8, "little")
            case Kind.REPLAY if self._kv_chunks:
                old = draw.choice(self._kv_chunks)
                where = _part(part, kv_chunk)
                where = slice(where.start, min(where.stop, len(old)))
                kv_chunk[where] = old[where]
            case _:
                return False
        return bytes(kv_chunk) != before

    def told(self, kind: Kind, told: KvChunkReady, draw: random.Random) -> KvChunkReady:
        """The announcement of a KV chunk, changed, or as it was when there is nothing to change to.

        Another hand-over's KV chunk comes back with the buffer of this one.
        """
        header = told.header
        match kind:
            case Kind.STALE:
                header = replace(header, instance_id=secrets.token_hex(16))
            case Kind.LAYOUT:
                header = replace(header, num_heads=header.num_heads + draw.randrange(1, 8))
            case Kind.LENGTH:
                header = replace(header, payload_bytes=draw.randrange(1, header.payload_bytes))
            case Kind.REPLAY if self._headers:
                header = draw.choice(self._headers)
        return replace(told, header=header)


def _part(part: str, kv_chunk: memoryview) -> slice:
    return {
        "header": slice(0, HEADER_BYTES),
        "payload": slice(HEADER_BYTES, len(kv_chunk)),
    }.get(part, slice(0, len(kv_chunk)))


def _flip(kv_chunk: memoryview, where: slice, draw: random.Random) -> None:
    """One bit."""
    kv_chunk[draw.randrange(where.start, where.stop)] ^= 1 << draw.randrange(8)


log = logging.getLogger(__name__)


class Injector(Faults):
    """See the port.

    injected: how often each rule, by its name, has really changed something. reached: how often
    each point was reached since `arm`.
    """

    def __init__(self, spec: FaultSpec) -> None:
        self.injected: Counter[str] = Counter()
        self._damage = Damage()
        self.arm(spec)

    def arm(self, spec: FaultSpec) -> None:
        """These rules from now on, with all counts of points reached at 0."""
        self._rules = [
            (rule, random.Random(f"{spec.seed} {i}")) for i, rule in enumerate(spec.rules)
        ]
        self.reached: Counter[str] = Counter()
        self._left = {rule: rule.times for rule in spec.rules}

    def due(self, point: str) -> list[tuple[Rule, random.Random]]:
        """A point was reached: what is to go wrong now."""
        self.reached[point] += 1
        return [
            (rule, draw)
            for rule, draw in self._rules
            if rule.point == point
            and rule.reaches(self.reached[point])
            and self._left[rule] != 0
            and (rule.rate == 1.0 or draw.random() < rule.rate)
        ]

    def happened(self, rule: Rule) -> None:
        left = self._left.get(rule)
        if left is not None:
            self._left[rule] = left - 1
        self.injected[rule.name] += 1
        log.debug("injected %s", rule.name)

    def stop_here(self, rule: Rule) -> None:
        """Freezes or kills this process, if that is what the rule says."""
        if rule.kind in (Kind.FREEZE, Kind.KILL):
            self.happened(rule)
            os.kill(os.getpid(), signal.SIGSTOP if rule.kind is Kind.FREEZE else signal.SIGKILL)

    async def at(self, point: str, kv_chunk: memoryview | None = None) -> None:
        for rule, draw in self.due(point):
            self.stop_here(rule)
            if rule.kind is Kind.DELAY:
                self.happened(rule)
                await asyncio.sleep(rule.seconds)
            elif kv_chunk is not None and self._damage.in_buffer(
                rule.kind, rule.part, kv_chunk, draw
            ):
                self.happened(rule)
        if kv_chunk is not None and point == "sender.sealed":
            self._damage.keep(kv_chunk)

    def hearing(self, side: str, incoming: AsyncIterator[In]) -> AsyncIterator[In]:
        async def heard() -> AsyncIterator[In]:
            async for message in incoming:
                for one in await self._changed(side, message, []):
                    yield one

        return heard()

    def saying(
        self, side: str, send: Callable[[Out], Awaitable[None]]
    ) -> Callable[[Out], Awaitable[None]]:
        held: list[KvChunkReady] = []

        async def say(message: Out) -> None:
            for one in await self._changed(side, message, held):
                await send(one)

        return say

    def transport(self, transport: KvTransport) -> KvTransport:
        return FaultyTransport(transport, self)

    async def _changed(self, side: str, message: Any, held: list[KvChunkReady]) -> list[Any]:
        """What becomes of a message. held: one of the same stream that waits to be swapped."""
        of = MESSAGES.get(type(message))
        for rule, draw in self.due(f"{side}.{of}") if of else ():
            self.stop_here(rule)
            match rule.kind:
                case Kind.DELAY:
                    self.happened(rule)
                    await asyncio.sleep(rule.seconds)
                case Kind.DROP:
                    self.happened(rule)
                    return []
                case Kind.SWAP if not held:
                    held.append(message)
                    self._swapping = rule
                    return []
                case Kind.STALE | Kind.LAYOUT | Kind.LENGTH | Kind.REPLAY:
                    damaged = self._damage.told(rule.kind, message, draw)
                    if damaged != message:
                        self.happened(rule)
                        return [damaged]
        if isinstance(message, KvChunkReady) and held:
            first = held.pop()
            self.happened(self._swapping)
            return [replace(first, buffer=message.buffer), replace(message, buffer=first.buffer)]
        if isinstance(message, KvChunkReady):
            self._damage.keep_told(message)
        elif held and isinstance(message, Tokens | Failed):
            # No second KV chunk came to swap it with.
            return [held.pop(), message]
        return [message]
