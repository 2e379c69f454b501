"""A verdict that does not flap: only several observations in a row against it change it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SteadyVerdict:
    """Good at first. patience: so many observations in a row change it, in either direction.

    One observation may be an accident (a pause, a full ring); a verdict that follows every one of
    them would send work away and call it back all the time.
    """

    patience: int = 2
    good: bool = True
    _against: int = 0

    def observe(self, good: bool) -> bool:
        """Takes one observation. True when it has changed the verdict."""
        self._against = 0 if good is self.good else self._against + 1
        if self._against < self.patience:
            return False
        self.good, self._against = good, 0
        return True
