"""Counts what hand-overs do, as plain numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from baton.core.observe.timings import Timings

# LinkSpeed, what hand-overs take that nothing hides.
#
# Two things are learned: how fast KV chunks are read, and what a hand-over takes from the news that
# all is computed to its end, beyond reading what was left then.

_KEEP = 0.95
"""Weight that evidence keeps with each newer one."""


class LinkSpeed:
    """bytes_per_s, handover_s: 0 until there was a KV chunk, or a whole hand-over. One thread
    writes, others may read."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._tail_s = self._tails = 0.0
        self.bytes_per_s = 0.0
        self.handover_s = 0.0

    def read(self, num_bytes: int, seconds: float) -> None:
        """A KV chunk's bytes came in so many seconds."""
        self._bytes = _KEEP * self._bytes + num_bytes
        self._seconds = _KEEP * self._seconds + seconds
        if self._seconds > 0.0:
            self.bytes_per_s = self._bytes / self._seconds

    def ended(self, bytes_left: int, seconds: float) -> None:
        """A hand-over was complete so long after all was computed; so much was to be read then."""
        known = bytes_left / self.bytes_per_s if self.bytes_per_s else 0.0
        self._tail_s = _KEEP * self._tail_s + max(0.0, seconds - known)
        self._tails = _KEEP * self._tails + 1.0
        self.handover_s = self._tail_s / self._tails


MISMATCHES = ("announcement", "header", "digest")


@dataclass(slots=True)
class HandoverStats:
    """Totals since the process start. Written on the event loop only, read by metrics.

    outcomes: hand-overs by how they ended: completed, full, failed or cancelled, when nobody wants
    the KV any more. mismatches: KV chunks that did not verify, by what was wrong: announcement (the
    stream's header is not what must come), header (the buffer holds another KV chunk) or digest
    (the bytes differ). peers_met: senders that were met, a sender met again included. probes: by
    path (self or peer) and outcome; probes count nowhere else. stages: how long each stage took, of
    those that came to their end; a sender's are open_wait, grant_wait, buffer_wait, pack, seal and
    confirm_wait, a receiver's meet, announce_wait, reserve, buffer_wait, read, verify, unpack and
    last_chunk (from the news that all is computed to the end). link: of a receiver.
    """

    kv_chunks: int = 0
    payload_bytes: int = 0
    transfer_errors: int = 0
    peers_met: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    probes: Counter[tuple[str, str]] = field(default_factory=Counter)
    stages: defaultdict[str, Timings] = field(default_factory=lambda: defaultdict(Timings))
    link: LinkSpeed = field(default_factory=LinkSpeed)

    def timed(self, stage: str) -> Stopwatch:
        """Times a block, if it is left in order."""
        return Stopwatch(self.stages[stage])

    def record(self, stage: str, since: float) -> None:
        """A stage that began at `since`, a reading of `now`, has ended."""
        self.stages[stage].add(perf_counter() - since)


class Stopwatch:
    """Used once, by `with`."""

    __slots__ = ("_began", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._timings.add(perf_counter() - self._began)


now = perf_counter
