"""Counts what hand-overs do, as plain numbers; knows nothing of how metrics are exported."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from baton.core.handover.link_speed import LinkSpeed
from baton.core.observe.timings import Timings

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

    def took(self, stage: str, since: float) -> None:
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
