"""Which streams lost something to a failure, and when, as the routers' logs tell."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

BUSY = "OVERLOADED"
"""A worker that is full refuses: nothing is lost by that."""


@dataclass(slots=True)
class Hit:
    """first: when the first loss was noticed, by the monotonic clock. roles: of who was lost."""

    first: float
    roles: set[str] = field(default_factory=set)


def hits(log: Path) -> dict[str, Hit]:
    """By request id. The log is that of this boot, in JSON lines."""
    found: dict[str, Hit] = {}
    to_monotonic = time.monotonic() - time.time()
    for line in log.read_text(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if not isinstance(said, dict) or not said.get("lost_at") or said["reason"] == BUSY:
            continue
        noticed = datetime.fromisoformat(said["time"]).timestamp() + to_monotonic
        found.setdefault(said["request_id"], Hit(noticed)).roles.add(said["lost_at"])
    return found
