"""Whether a failed call is made again, and after how long; reads no clock and makes no call."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.core.errors import BatonError


@dataclass(frozen=True, slots=True)
class Retries:
    """most: calls after the first one. Without a word from the server the pauses start at first_s
    and double, up to longest_s; half of each is drawn, so that clients do not come back together.
    """

    most: int = 2
    first_s: float = 0.5
    longest_s: float = 8.0


DEFAULT = Retries()


class Tries:
    """The calls made for one request. timeout_s: for all of them together. now: on the clock whose
    readings the others get, too."""

    def __init__(self, retries: Retries, timeout_s: float | None, now: float) -> None:
        self._retries = retries
        self._deadline = None if timeout_s is None else now + timeout_s
        self._made = 0

    def left_s(self, now: float) -> float | None:
        """What the next call gets; None: as long as it takes."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def pause_s(self, error: BatonError, now: float, *, came: bool) -> float:
        """How long to wait before the next call. Raises the error when there is to be none: it is
        of no use, or something of the answer came already.
        """
        self._made += 1
        if came or not error.retryable or self._made > self._retries.most:
            raise error
        pause_s = error.retry_after_s
        if pause_s is None:
            most_s = min(self._retries.longest_s, self._retries.first_s * 2 ** (self._made - 1))
            pause_s = most_s * random.uniform(0.5, 1.0)
        if self._deadline is not None and now + pause_s >= self._deadline:
            raise error
        return pause_s
