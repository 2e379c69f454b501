"""Requests, their records, and the times of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, exp, log, sqrt


@dataclass(frozen=True, slots=True)
class Cadence:
    """The times at which consecutive quiet decode steps end.

    While the same sequences run, each step reads one more position per sequence than the step
    before, so each takes longer by the same time.
    """

    began: float
    """When the first step began."""
    first_s: float
    """Duration of the first step, above 0."""
    more_s: float
    """Difference of duration between consecutive steps."""

    def end(self, steps: int) -> float:
        """Returns when so many steps have ended."""
        return self.began + steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def length(self, step: int) -> float:
        """Returns the duration of a step, counted from 0."""
        return self.first_s + step * self.more_s

    def done(self, now: float) -> int:
        """Returns how many steps have ended by a time."""
        passed = now - self.began
        if self.more_s > 0.0:
            half = self.first_s - self.more_s / 2
            found = (sqrt(half * half + 2 * self.more_s * max(0.0, passed)) - half) / self.more_s
        else:
            found = passed / self.first_s
        steps = max(0, int(found))
        # Uses the rounding of `end`, which is the reference.
        while self.end(steps + 1) <= now:
            steps += 1
        while steps and self.end(steps) > now:
            steps -= 1
        return steps

    def after(self, steps: int) -> Cadence:
        """Returns the cadence of the steps after the first `steps`."""
        return Cadence(self.end(steps), self.length(steps), self.more_s)


GROWTH = log(1.02)
"""Growth of a class's bounds, so that a quantile is within 1 %."""

Counts = dict[int, int]


def class_of(seconds: float) -> int:
    """Returns the class of a time between tokens. A time of 0 is in the class of a nanosecond."""
    return int(log(max(seconds, 1e-9) / 1e-9) / GROWTH)


def middle(which: int) -> float:
    """Returns the seconds that represent a class."""
    return 1e-9 * exp((which + 0.5) * GROWTH)


def of_steps(cadence: Cadence, first: int, end: int) -> list[tuple[int, int]]:
    """Returns (class, count) of steps [first, end)."""
    found: list[tuple[int, int]] = []
    while first < end:
        which = class_of(cadence.length(first))
        last = end
        if class_of(cadence.length(end - 1)) != which:
            bound = 1e-9 * exp((which + 1) * GROWTH)
            last = min(end, max(first + 1, ceil((bound - cadence.first_s) / cadence.more_s)))
        found.append((which, last - first))
        first = last
    return found


def merged(many: Iterable[Counts]) -> Counts:
    found: Counts = {}
    for counts in many:
        for which, count in counts.items():
            found[which] = found.get(which, 0) + count
    return found


def gap_quantile(counts: Counts, share: float) -> float:
    """Returns a quantile in seconds, within 1 %; 0.0 if empty."""
    total = sum(counts.values())
    left = min(total - 1, int(share * total))
    for which in sorted(counts):
        left -= counts[which]
        if left < 0:
            return middle(which)
    return 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request that arrives."""

    arrival: float
    """Seconds from the start."""
    input_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    names: tuple[int, ...] = ()
    """Names of the input's stretches of `stretch` tokens, see `Prompt`; empty: shares nothing."""
    stretch: int = 512


@dataclass(slots=True, eq=False)
class Record:
    """The outcome of one request. Times are virtual seconds; None: never."""

    number: int
    request: Request
    placed: float | None = None
    """When it was first assigned workers."""
    first_token: float | None = None
    ended: float | None = None
    prefill: int | None = None
    """Number of its last prefill worker; None: decode computed its prompt."""
    decode: int | None = None
    """Number of its last decode worker."""
    cached_tokens: int = 0
    """Cached tokens of its prompt, on the worker that computed it."""
    moved_tokens: int = 0
    """Tokens whose KV was handed over."""
    attempts: int = 0
    tokens: int = 0
    refused: str = ""
    """Why it was not answered, or ""."""
    last: float = 0.0
    """When its newest token arrived."""
    gaps: Counts = field(default_factory=dict)
    """Times between its tokens, by class."""

    @property
    def first_token_s(self) -> float | None:
        """The time from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    def token(self, now: float) -> None:
        """Adds a token. After a restarted attempt only new tokens count."""
        if self.first_token is None:
            self.first_token = now
        else:
            which = class_of(now - self.last)
            self.gaps[which] = self.gaps.get(which, 0) + 1
        self.last = now
        self.tokens += 1

    def many(self, first: float, last: float, count: int, between: list[tuple[int, int]]) -> None:
        """Adds `count` tokens, of which the first and the last have these times; between: the times
        between them, by class."""
        self.token(first)
        for which, number in between:
            self.gaps[which] = self.gaps.get(which, 0) + number
        self.last = last
        self.tokens += count - 1
