"""Counts what hand-overs do, as plain integers; knows nothing of how metrics are exported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HandoverStats:
    """Totals since the process start. Written on the event loop only, read by metrics.

    outcomes: hand-overs by how they ended: completed, full or failed. mismatches: parcels that did
    not verify, by what was wrong: announcement (the stream's header is not what must come), header
    (the slot holds another parcel) or digest (the bytes differ).
    """

    parcels: int = 0
    payload_bytes: int = 0
    transfer_errors: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
