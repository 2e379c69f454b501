"""Claim, room that is being made for one reservation; knows no blocks.

What was taken for it from the less important comes free only with the steps in flight. Until then
nobody may take it who is not more important than the claim. One claim is held at a time, for a
short while; whoever has it asks again.
"""

from __future__ import annotations

from baton.core.request.attempt import AttemptKey

CLAIM_S = 0.5
"""Longer than steps take, and short for those who wait if nobody asks again."""


class Reservation:
    """Times are readings of the scheduler's clock, in seconds."""

    def __init__(self) -> None:
        self._key: AttemptKey | None = None
        self._priority = 0
        self._until = 0.0

    def hold(self, key: AttemptKey, priority: int, now: float) -> None:
        self._key, self._priority, self._until = key, priority, now + CLAIM_S

    def drop(self, key: AttemptKey) -> None:
        """Ends the claim if it is this attempt's."""
        if self._key == key:
            self._key = None

    def is_of(self, key: AttemptKey, now: float) -> bool:
        return self._key == key and now < self._until

    def outranks(self, priority: int, now: float) -> bool:
        """Whether room must not go to somebody of this priority now."""
        return self._key is not None and now < self._until and self._priority <= priority

    @property
    def until(self) -> float | None:
        """When it lapses, or None when there is none."""
        return None if self._key is None else self._until
