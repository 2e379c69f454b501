"""FairBound, a bound on what all callers hold together that no caller can exhaust; knows no clock.

A caller may hold up to `factor` times what is then still free, by its weight (dynamic thresholds:
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). One
caller alone gets factor / (1 + factor) of the bound; when several are greedy, each gets its
weight's share as soon as what they held before has been given back; and some of it is always free.
A caller that holds nothing is let in whenever its first amount is free.

The invariant, for callers of equal weight whose amounts are at most M: whatever k others take and
give back, in any order, F = most / (1 + factor)^k - M / factor of the bound stays free of them. So
a caller that never holds more than factor / (1 + factor) x F is never kept out because of others.
"""

from __future__ import annotations

from collections import Counter


class FairBound:
    """factor: see the module."""

    def __init__(self, factor: float) -> None:
        self.total = 0
        """Held by all callers together."""
        self._factor = factor
        self._held: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        """Of those who hold something."""
        self._num_of_weight: Counter[float] = Counter()
        """How many of those there are of each weight."""

    def held(self, caller: str) -> int:
        return self._held.get(caller, 0)

    def has_room(self, caller: str, weight: float, amount: int, most: float) -> bool:
        """Whether a caller may hold so much more, while all may hold `most`. Larger amounts only
        have less room. A caller without a name has nobody to share with."""
        # One alone is let in whatever its size, or it could never be.
        if not self.total:
            return True
        left = most - self.total - amount
        held = self._held.get(caller, 0)
        if left < 0 or not (held and caller):
            return left >= 0
        heaviest = max(weight, *self._num_of_weight)
        return held + amount <= self._factor * weight / heaviest * left

    def take(self, caller: str, weight: float, amount: int) -> None:
        """Whether there is room is the caller's to ask, with `has_room`."""
        if not amount:
            return
        if caller not in self._held:
            self._held[caller] = 0
            self._weights[caller] = weight
            self._num_of_weight[weight] += 1
        self._held[caller] += amount
        self.total += amount

    def give_back(self, caller: str, amount: int) -> None:
        """As much as was taken, all in all."""
        if not amount:
            return
        self.total -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]
            weight = self._weights.pop(caller)
            self._num_of_weight[weight] -= 1
            if not self._num_of_weight[weight]:
                del self._num_of_weight[weight]
