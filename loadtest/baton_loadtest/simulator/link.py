"""Link, a worker's end of the network that KV moves on."""

from __future__ import annotations


class Link:
    """Moves one thing after another, at bytes_per_s."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.busy_s = 0.0
        self.bytes = 0

    def take(self, now: float, num_bytes: int) -> float:
        """When bytes that are ready now have passed this end."""
        seconds = num_bytes / self._bytes_per_s if num_bytes else 0.0
        self._free_at = max(self._free_at, now) + seconds
        self.busy_s += seconds
        self.bytes += num_bytes
        return self._free_at


def moved(now: float, num_bytes: int, sender: Link, receiver: Link) -> float:
    """When they are at the receiver: both ends are taken, by both at once."""
    return max(sender.take(now, num_bytes), receiver.take(now, num_bytes))
