"""Injects faults into KV hand-overs, by rules and a seed.

A spec is one line of text:

    seed=7; corrupt@sender.sealed:rate=0.01; freeze@receiver.reading:at=3;
    drop@sender.told:every=100

Each rule is KIND@POINT with settings after a colon:
- rate: the probability each time the point is reached;
- at: the first time (counted from 1); the only time if neither `every` nor `rate` is given;
- every: every n-th time, starting with `at` if that is given;
- times: the maximum number of times;
- seconds: how long a delay, or a read that is not reported as done, lasts (default: forever);
- part: header or payload, for faults that damage a KV chunk.

A point is "side.what". Points of messages are reached when a side sends or receives that message.
The others lie within a side's own work: at `sender.sealed` and `receiver.read` a buffer holds a
whole KV chunk, and damage to it must be detected by the other side or by the side's own
verification. `transport.read` is a read that was just posted. Another process must resume a process
that freezes itself (SIGCONT).
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import KvPayload
from batonlm.transfer.kv_chunk import HEADER_BYTES
from batonlm.transfer.staging import Faults, In, KvTransport, Out, ReadState
from batonlm.transfer.stream import joined, parts
from batonlm.v1 import handover_pb2 as pb

log = logging.getLogger(__name__)

MESSAGES: Mapping[str, str] = {
    "open": "opened",
    "announced": "announced",
    "granted": "granted",
    "full": "refused",
    "finished": "finished",
    "credit": "credited",
    "kv_chunk": "told",
    "collected": "confirmed",
    "tokens": "tokens_told",
    "completed": "completed",
}
"""The name of a message's point, by the message's field in the stream. The sending and the
receiving side use the same name."""

SENDER_WORK = ("sender.buffer_taken", "sender.packed", "sender.sealed")
RECEIVER_WORK = (
    "receiver.reserved",
    "receiver.reading",
    "receiver.read",
    "receiver.verified",
    "receiver.unpacked",
)
TRANSPORT_READ = "transport.read"

MESSAGE_POINTS = tuple(
    f"{side}.{of}" for side in ("sender", "receiver") for of in MESSAGES.values()
)
POINTS = (*MESSAGE_POINTS, *SENDER_WORK, *RECEIVER_WORK, TRANSPORT_READ)

FIELD = "kv_faults"


class FaultKind(Enum):
    """Kinds of faults. The values are the words in a spec."""

    DELAY = "delay"
    DROP = "drop"
    FREEZE = "freeze"
    KILL = "kill"
    CORRUPT = "corrupt"
    STALE = "stale"
    REPLAY = "replay"
    LENGTH = "length"
    LAYOUT = "layout"
    SWAP = "swap"
    TRUNCATE = "truncate"


_DAMAGE = frozenset({FaultKind.STALE, FaultKind.REPLAY, FaultKind.LENGTH, FaultKind.LAYOUT})
_ANYWHERE = frozenset({FaultKind.DELAY, FaultKind.FREEZE, FaultKind.KILL})
_EXTRA: Mapping[str, frozenset[FaultKind]] = {
    "sender.told": _DAMAGE | {FaultKind.SWAP},
    "sender.sealed": _DAMAGE | {FaultKind.CORRUPT},
    "receiver.read": frozenset({FaultKind.CORRUPT}),
    TRANSPORT_READ: frozenset({FaultKind.DROP, FaultKind.TRUNCATE, FaultKind.SWAP}),
}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One fault to inject. The module's docstring describes the settings."""

    kind: FaultKind
    point: str
    rate: float = 1.0
    at: int = 1
    every: int = 1
    """0: not repeated."""
    times: int | None = None
    """None: no limit."""
    seconds: float = math.inf
    part: str = ""
    """header, payload, or empty for either."""

    @property
    def name(self) -> str:
        return f"{self.kind.value}@{self.point}"

    def reaches(self, count: int) -> bool:
        """Returns whether the fault may happen when its point is reached for the count-th time."""
        after = count - self.at
        return after == 0 or (after > 0 and self.every > 0 and after % self.every == 0)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """All rules, and the seed of random choices."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0


def kinds_at(point: str) -> frozenset[FaultKind]:
    """Returns the kinds of faults that are possible at a point."""
    drops = frozenset({FaultKind.DROP}) if point in MESSAGE_POINTS else frozenset()
    return _ANYWHERE | drops | _EXTRA.get(point, frozenset())


def parse(text: str) -> FaultSpec:
    """Parses a spec. Raises InvalidArgument with the faulty rule and the allowed values."""
    rules, seed = [], 0
    for item in filter(None, (part.strip() for part in text.split(";"))):
        if item.startswith("seed="):
            seed = _whole(item, "seed", item.removeprefix("seed="), least=0)
        else:
            rules.append(_rule(item))
    return FaultSpec(tuple(rules), seed)


def _rule(item: str) -> FaultRule:
    head, _, settings = item.partition(":")
    word, _, point = head.partition("@")
    if point not in POINTS:
        raise _refused(item, f"{point!r} is not a point; points are {', '.join(POINTS)}")
    allowed = sorted(kind.value for kind in kinds_at(point))
    if word not in allowed:
        raise _refused(item, f"what can go wrong at {point} is {', '.join(allowed)}")
    given: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        key, separator, value = setting.partition("=")
        if not separator or key.strip() in given:
            raise _refused(item, f"{setting!r} is not a setting, or is given twice")
        given[key.strip()] = value.strip()
    return _with_settings(item, FaultKind(word), point, given)


def _with_settings(item: str, kind: FaultKind, point: str, given: dict[str, str]) -> FaultRule:
    known = {"rate", "at", "every", "times"}
    if kind is FaultKind.DELAY or (kind is FaultKind.DROP and point == TRANSPORT_READ):
        known.add("seconds")
    if kind in (FaultKind.CORRUPT, FaultKind.REPLAY) and point != "sender.told":
        known.add("part")
    for key in given.keys() - known:
        raise _refused(
            item, f"{key!r} is no setting of it; settings are {', '.join(sorted(known))}"
        )
    if kind is FaultKind.DELAY and "seconds" not in given:
        raise _refused(item, "a delay needs seconds")
    part = given.get("part", "")
    if part not in ("", "header", "payload"):
        raise _refused(item, "part must be header or payload")
    once = "at" in given and not given.keys() & {"every", "rate"}
    return FaultRule(
        kind,
        point,
        rate=_number(item, "rate", given.get("rate", "1"), most=1.0),
        at=_whole(item, "at", given.get("at", given.get("every", "1"))),
        every=0 if once else _whole(item, "every", given.get("every", "1")),
        times=_whole(item, "times", given["times"]) if "times" in given else None,
        seconds=_number(item, "seconds", given.get("seconds", "inf")),
        part=part,
    )


def _whole(item: str, key: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise _refused(item, f"{key} must be a whole number from {least}")
    return int(text)


def _number(item: str, key: str, text: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise _refused(item, f"{key} must be a number above 0, at most {most:g}")
    return value


def _refused(item: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{item!r}: {why}", field=FIELD)


LEFT_OUT = 16
"""A truncated read misses at least this many bytes: fewer could match the old content by chance."""


@dataclass(frozen=True, slots=True)
class _Read:
    handle: object
    hidden_until: float
    """Monotonic clock reading; until then the read is reported as running."""


class FaultyTransport:
    """A `KvTransport` with injected faults in its reads, at the point `transport.read`.

    It reports a read as done late or never, reads only half of it, or reads another buffer, as a
    stale reference would. It never releases a read that the inner transport has not ended, so all
    faults stay within the contract of `KvTransport`.
    """

    def __init__(self, inner: KvTransport, faults: FaultInjector) -> None:
        self._inner, self._faults = inner, faults
        self._num_buffers: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, peer: str, metadata: bytes, ring: pb.StagingPoolDescription) -> None:
        self._inner.add_peer(peer, metadata, ring)
        self._num_buffers[peer] = ring.num_buffers

    def remove_peer(self, peer: str) -> None:
        self._inner.remove_peer(peer)

    def post(self, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int) -> object:
        hidden_until = -math.inf
        due = self._faults.due(TRANSPORT_READ)
        for rule, draw in due:
            match rule.kind:
                case FaultKind.TRUNCATE if num_bytes > LEFT_OUT:
                    num_bytes = draw.randint(1, num_bytes - LEFT_OUT)
                case FaultKind.SWAP if peer in self._num_buffers:
                    remote_buffer = (remote_buffer + 1) % self._num_buffers[peer]
                case FaultKind.DELAY | FaultKind.DROP:
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


# Byte ranges of fields in the binary header; see batonlm.transfer.kv_chunk.
_INSTANCE_ID, _LAYOUT, _LENGTH = slice(8, 24), slice(68, 76), slice(76, 84)

KEPT = 8
"""How many old KV chunks, and headers, one side keeps."""


class Damage:
    """Damages KV chunks of one sender or receiver, in their buffers or in their announcements.

    It keeps a few old chunks and headers, in order to replay them.
    """

    def __init__(self) -> None:
        self._kv_chunks: deque[bytes] = deque(maxlen=KEPT)
        self._headers: deque[pb.KvChunkHeader] = deque(maxlen=KEPT)

    def keep(self, kv_chunk: KvPayload) -> None:
        self._kv_chunks.append(bytes(_bytes_of(kv_chunk)))

    def keep_header(self, header: pb.KvChunkHeader) -> None:
        self._headers.append(header)

    def in_buffer(self, kind: FaultKind, part: str, buffer: KvPayload, draw: random.Random) -> bool:
        """Damages a chunk in place. Returns whether anything changed. buffer: header and payload as
        they lie there."""
        kv_chunk = _bytes_of(buffer)
        before = bytes(kv_chunk)
        match kind:
            case FaultKind.CORRUPT:
                _flip(kv_chunk, _part(part, kv_chunk), draw)
            case FaultKind.STALE:
                kv_chunk[_INSTANCE_ID] = draw.randbytes(16)
            case FaultKind.LAYOUT:
                kv_chunk[_LAYOUT] = draw.randbytes(8)
            case FaultKind.LENGTH:
                length = int.from_bytes(kv_chunk[_LENGTH], "little")
                kv_chunk[_LENGTH] = draw.randrange(1, length).to_bytes(8, "little")
            case FaultKind.REPLAY if self._kv_chunks:
                old = draw.choice(self._kv_chunks)
                where = _part(part, kv_chunk)
                where = slice(where.start, min(where.stop, len(old)))
                kv_chunk[where] = old[where]
            case _:
                return False
        return bytes(kv_chunk) != before

    def header(
        self, kind: FaultKind, header: pb.KvChunkHeader, draw: random.Random
    ) -> pb.KvChunkHeader:
        """Returns a damaged copy of an announced header, or the header if there is no old one to
        use."""
        if kind is FaultKind.REPLAY:
            return draw.choice(self._headers) if self._headers else header
        changed = pb.KvChunkHeader()
        changed.CopyFrom(header)
        match kind:
            case FaultKind.STALE:
                changed.instance_id = secrets.token_hex(16)
            case FaultKind.LAYOUT:
                changed.num_heads += draw.randrange(1, 8)
            case FaultKind.LENGTH:
                changed.payload_bytes = draw.randrange(1, header.payload_bytes)
        return changed


def _bytes_of(buffer: KvPayload) -> memoryview:
    """To read and write. Memory that stands for a device's is a tensor of the host."""
    if isinstance(buffer, memoryview):
        return buffer
    tensor: Any = buffer
    return memoryview(tensor.numpy())


def _part(part: str, kv_chunk: memoryview) -> slice:
    return {
        "header": slice(0, HEADER_BYTES),
        "payload": slice(HEADER_BYTES, len(kv_chunk)),
    }.get(part, slice(0, len(kv_chunk)))


def _flip(kv_chunk: memoryview, where: slice, draw: random.Random) -> None:
    """Flips one random bit."""
    kv_chunk[draw.randrange(where.start, where.stop)] ^= 1 << draw.randrange(8)


class FaultInjector(Faults):
    """Injects faults into hand-overs at their points, by the rules of a spec."""

    def __init__(self, spec: FaultSpec) -> None:
        self.injected: Counter[str] = Counter()
        """How often each rule, by its name, actually changed something."""
        self._damage = Damage()
        self.arm(spec)

    def arm(self, spec: FaultSpec) -> None:
        """Replaces the rules and resets all counts of points reached to 0."""
        self._rules = [
            (rule, random.Random(f"{spec.seed} {i}")) for i, rule in enumerate(spec.rules)
        ]
        self.reached: Counter[str] = Counter()
        """How often each point was reached since `arm`."""
        self._left = {rule: rule.times for rule in spec.rules}

    def due(self, point: str) -> list[tuple[FaultRule, random.Random]]:
        """Counts that a point was reached. Returns the faults to inject now."""
        self.reached[point] += 1
        return [
            (rule, draw)
            for rule, draw in self._rules
            if rule.point == point
            and rule.reaches(self.reached[point])
            and self._left[rule] != 0
            and (rule.rate == 1.0 or draw.random() < rule.rate)
        ]

    def happened(self, rule: FaultRule) -> None:
        left = self._left.get(rule)
        if left is not None:
            self._left[rule] = left - 1
        self.injected[rule.name] += 1
        log.debug("injected %s", rule.name)

    def stop_here(self, rule: FaultRule) -> None:
        """Freezes or kills this process, if the rule is of that kind."""
        if rule.kind in (FaultKind.FREEZE, FaultKind.KILL):
            self.happened(rule)
            os.kill(
                os.getpid(), signal.SIGSTOP if rule.kind is FaultKind.FREEZE else signal.SIGKILL
            )

    async def at(self, point: str, kv_chunk: KvPayload | None = None) -> None:
        for rule, draw in self.due(point):
            self.stop_here(rule)
            if rule.kind is FaultKind.DELAY:
                self.happened(rule)
                await asyncio.sleep(rule.seconds)
            elif kv_chunk is not None and self._damage.in_buffer(
                rule.kind, rule.part, kv_chunk, draw
            ):
                self.happened(rule)
        if kv_chunk is not None and point == "sender.sealed":
            self._damage.keep(kv_chunk)

    def incoming(self, side: str, messages: AsyncIterator[In]) -> AsyncIterator[In]:
        async def received() -> AsyncIterator[In]:
            async for message in messages:
                for part in parts(message):
                    for one in await self._changed(side, part, []):
                        yield one

        return received()

    def outgoing(
        self, side: str, send: Callable[[Out], Awaitable[None]]
    ) -> Callable[[Out], Awaitable[None]]:
        held: list[pb.CollectResponse] = []

        async def send_changed(message: Out) -> None:
            changed = [await self._changed(side, part, held) for part in parts(message)]
            if together := [one for each in changed for one in each]:
                await send(joined(together))

        return send_changed

    def transport(self, transport: KvTransport) -> KvTransport:
        return FaultyTransport(transport, self)

    async def _changed(self, side: str, message: Any, held: list[pb.CollectResponse]) -> list[Any]:
        """Returns the messages to pass on in place of one. held: a message of the same stream that
        waits to be swapped with the next one."""
        field = message.WhichOneof("message")
        point = MESSAGES.get(field)
        for rule, draw in self.due(f"{side}.{point}") if point else ():
            self.stop_here(rule)
            match rule.kind:
                case FaultKind.DELAY:
                    self.happened(rule)
                    await asyncio.sleep(rule.seconds)
                case FaultKind.DROP:
                    self.happened(rule)
                    return []
                case FaultKind.SWAP if not held:
                    held.append(message)
                    self._swapping = rule
                    return []
                case FaultKind.STALE | FaultKind.LAYOUT | FaultKind.LENGTH | FaultKind.REPLAY:
                    header = self._damage.header(rule.kind, message.kv_chunk.header, draw)
                    if header != message.kv_chunk.header:
                        self.happened(rule)
                        return [_ready(header, message.kv_chunk.buffer)]
        if field == "kv_chunk" and held:
            first, second = held.pop().kv_chunk, message.kv_chunk
            self.happened(self._swapping)
            return [_ready(first.header, second.buffer), _ready(second.header, first.buffer)]
        if field == "kv_chunk":
            self._damage.keep_header(message.kv_chunk.header)
        elif held and field in ("tokens", "failed"):
            # No second KV chunk arrived to swap it with.
            return [held.pop(), message]
        return [message]


def _ready(header: pb.KvChunkHeader, buffer: int) -> pb.CollectResponse:
    return pb.CollectResponse(kv_chunk=pb.KvChunkReady(header=header, buffer=buffer))
