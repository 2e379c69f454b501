"""Counts what hand-overs do, as plain numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from batonlm.core.observe.timings import Durations

_KEEP = 0.95
"""Weight that evidence keeps with each newer one."""


class LinkSpeed:
    """What hand-overs take that nothing hides: how fast KV chunks are read, and what a hand-over
    takes from the news that all is computed to its end, beyond reading what was left then.

    One thread writes, others may read.
    """

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._tail_s = self._tails = 0.0
        self.bytes_per_s = 0.0
        """0: no KV chunk was read yet."""
        self.handover_s = 0.0
        """0: no hand-over came to its end yet."""

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
    """Totals since the process start. Written on the event loop only, read by metrics."""

    kv_chunks: int = 0
    payload_bytes: int = 0
    transfer_errors: int = 0
    peers_met: int = 0
    """Senders that were met; one that was met again counts again."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Hand-overs by how they ended: completed, full, failed, or cancelled when nobody wants the KV
    any more."""
    mismatches: Counter[str] = field(default_factory=Counter)
    """KV chunks that did not verify, by what was wrong: announcement (the stream's header is not
    what must come), header (the buffer holds another KV chunk) or digest (the bytes differ)."""
    probes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Probes by path (self or peer) and outcome; probes count nowhere else."""
    stages: defaultdict[str, Durations] = field(default_factory=lambda: defaultdict(Durations))
    """How long each stage took, of those that came to their end. A sender's are open_wait,
    grant_wait, buffer_wait, pack, seal and confirm_wait; a receiver's meet, announce_wait, reserve,
    buffer_wait, read, verify, unpack and last_chunk (from the news that all is computed to the
    end)."""
    link: LinkSpeed = field(default_factory=LinkSpeed)
    """Of a receiver."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Times a block, unless an exception leaves it."""
        began = perf_counter()
        yield
        self.stages[stage].add(perf_counter() - began)

    def record(self, stage: str, since: float) -> None:
        """A stage that began at `since`, a reading of `now`, has ended."""
        self.stages[stage].add(perf_counter() - since)


now = perf_counter
