"""Decides the size of one pool: bounds, steps, a cool-down, and respect for a hand-set size.

In: the size that the pool has, the size that it needs, and the time. Out: a size and why.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.scaling import Bounds

HAND_S = 900.0
"""A size that somebody else has set is kept for so long."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Raises InvalidArgument."""

    bounds: Bounds
    cool_down_s: float = 120.0
    """A pool shrinks to the most that it needed within this time, and not within it after it
    changed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.cool_down_s < float("inf"):
            raise InvalidArgument("must not be below 0", field="cool_down_s")


@dataclass(frozen=True, slots=True)
class Decision:
    """A size, and a sentence that says why."""

    size: int
    why: str


class PoolPlan:
    """Decides for one pool. Call `decide` with times that grow.

    It grows at once, to at most twice its size, and shrinks by a quarter at a time. So a change in
    the other direction comes at least a cool-down after a growth, and after the first decision.
    """

    def __init__(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self._ours: int | None = None
        """The size that the pool has by the last decision; None: nothing was decided yet."""
        self._chosen: int | None = None
        """What the last decision was."""
        self._by_hand_until = float("-inf")
        self._changed_at = float("-inf")
        self._needed: deque[tuple[float, int]] = deque()

    def decide(self, now: float, size: int, need: int, reason: str) -> Decision:
        """size: what the pool is told to have now. need: workers that it should have."""
        policy = self._policy
        wanted = policy.bounds.within(need)
        self._needed.append((now, wanted))
        while self._needed[0][0] < now - policy.cool_down_s:
            self._needed.popleft()
        if self._ours is None:
            # What a planner before this one needed, and changed, is not known.
            self._changed_at = now
        elif size != self._ours:
            if size == self._chosen:
                # It was carried out, though the answer that says so was lost.
                self._changed_at = now
            else:
                self._by_hand_until = now + HAND_S
        self._ours = self._chosen = size
        if now < self._by_hand_until:
            return Decision(size, f"kept at {size}, which somebody else has set")
        least = max(needed for _, needed in self._needed)
        chosen = size
        if wanted > size:
            chosen = min(wanted, max(2 * size, size + 1))
        elif least < size and now - self._changed_at >= policy.cool_down_s:
            chosen = max(least, size - max(1, size // 4))
        if chosen == size:
            return Decision(size, f"kept at {size}: {reason}")
        self._chosen = chosen
        return Decision(chosen, f"from {size} to {chosen}: {reason}")

    def done(self, now: float, size: int) -> None:
        """A decision was carried out: the pool is told to have this size."""
        self._ours, self._changed_at = size, now
