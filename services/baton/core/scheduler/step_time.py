"""StepTimes, how long a step of so many tokens will take; knows no clock, only what it is told.

The guess is pessimistic on purpose, because whoever waits longer than a multiple of it takes the
worker for dead. It follows slower steps at once and faster ones slowly, in classes of token counts
that double from one to the next.
"""

from __future__ import annotations

_FORGET = 0.05
"""Weight of a step that was faster than expected."""


class StepTimes:
    """first_s: the guess before anything is known, in seconds (first steps warm up and compile)."""

    def __init__(self, first_s: float = 10.0):
        self._first_s = first_s
        self._by_class: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        size = num_tokens.bit_length()
        known = self._by_class.get(size, seconds)
        self._by_class[size] = max(seconds, known + _FORGET * (seconds - known))

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens may take.

        A class without steps of its own borrows: a larger one's time as it is, a smaller one's in
        proportion to the tokens.
        """
        size = num_tokens.bit_length()
        own = self._by_class.get(size)
        if own is not None:
            return own
        larger = [known for known in self._by_class if known > size]
        if larger:
            return self._by_class[min(larger)]
        if self._by_class:
            largest = max(self._by_class)
            return self._by_class[largest] * 2.0 ** (size - largest)
        return self._first_s
