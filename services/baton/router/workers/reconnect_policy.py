"""When a stream that broke counts as lost, and how long to pause before the next try.

A stream is lost when its worker was silent for the window, or when the worker's address refused
several tries in a row: then nobody listens there and waiting is no use.
"""

from __future__ import annotations

import random

from baton.rpc.awake import Clock

SILENCE_S = 2.0
"""No message at all for this long means dead: workers send a sign of life every 500 ms."""

MAX_REFUSALS = 3
FIRST_PAUSE_S = 0.03
LONGEST_PAUSE_S = 1.0


class ReconnectPolicy:
    """The patience with one worker's stream. clock: see `AwakeClock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock()
        self._failures = 0
        self._given_up = False

    def alive(self) -> None:
        """A message came."""
        self._since = self._clock()
        self._failures = 0
        self._given_up = False

    def failed(self) -> None:
        """The stream broke, or could not be opened."""
        self._failures += 1

    def give_up(self) -> None:
        """No use in waiting any longer: the worker hangs, or another one answers in its place."""
        self._given_up = True

    @property
    def spent(self) -> bool:
        """Whether what hung on the stream is lost."""
        return (
            self._given_up
            or self._failures > MAX_REFUSALS
            or self._clock() - self._since >= SILENCE_S
        )

    @property
    def pause_s(self) -> float:
        """Grows with each failure; jittered, so that routers do not come back all at once."""
        pause = FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)
        return float(min(pause, LONGEST_PAUSE_S) * random.uniform(0.7, 1.3))
