"""Counts the decode workers that take KV from here; knows nothing of what they take."""

from __future__ import annotations

from collections import OrderedDict

LIVE_S = 60.0
MAX_KNOWN = 1024


class LiveReceivers:
    """Decode workers by instance id and when each was named last, in seconds of one clock."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()

    def saw(self, instance_id: str, now: float) -> int:
        """A decode worker will collect. Returns how many were named within the last minute."""
        self._seen[instance_id] = now
        self._seen.move_to_end(instance_id)
        while len(self._seen) > MAX_KNOWN or next(iter(self._seen.values())) < now - LIVE_S:
            self._seen.popitem(last=False)
        return len(self._seen)
