"""Request, what comes in, and Record, what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, exp, log, sqrt

# Cadence, the times at which a row of quiet decode steps ends.
#
# While the same sequences run, each step reads as many positions more than the one before as there
# are sequences, so steps grow longer by the same time each.


@dataclass(frozen=True, slots=True)
class Cadence:
    """began: when the first step began. first_s: how long it takes, above 0; more_s: by how much
    each one takes longer than the one before."""

    began: float
    first_s: float
    more_s: float

    def end(self, steps: int) -> float:
        """When so many steps are done."""
        return self.began + steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def length(self, step: int) -> float:
        """Of a step, from 0."""
        return self.first_s + step * self.more_s

    def done(self, now: float) -> int:
        """How many steps have ended by a time."""
        passed = now - self.began
        if self.more_s > 0.0:
            half = self.first_s - self.more_s / 2
            found = (sqrt(half * half + 2 * self.more_s * max(0.0, passed)) - half) / self.more_s
        else:
            found = passed / self.first_s
        steps = max(0, int(found))
        # By the same rounding as `end`, which is what counts.
        while self.end(steps + 1) <= now:
            steps += 1
        while steps and self.end(steps) > now:
            steps -= 1
        return steps

    def after(self, steps: int) -> Cadence:
        """The steps behind so many."""
        return Cadence(self.end(steps), self.length(steps), self.more_s)


# Gaps, times between tokens in classes that grow by 2 %; keeps no single one.
#
# Also of many steps at once, by their Cadence.


GROWTH = log(1.02)
"""Of a class's bounds, so that a quantile is right within 1 %."""

Counts = dict[int, int]


def class_of(seconds: float) -> int:
    """Times of 0 are in the class of a nanosecond."""
    return int(log(max(seconds, 1e-9) / 1e-9) / GROWTH)


def middle(which: int) -> float:
    """Seconds that stand for a class."""
    return 1e-9 * exp((which + 0.5) * GROWTH)


def of_steps(cadence: Cadence, first: int, end: int) -> list[tuple[int, int]]:
    """(class, how many) of the steps from `first` to before `end`."""
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
    """Seconds that this share of all is at most, within 1 %; 0.0 of none."""
    total = sum(counts.values())
    left = min(total - 1, int(share * total))
    for which in sorted(counts):
        left -= counts[which]
        if left < 0:
            return middle(which)
    return 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds from the start. input_tokens, output_tokens: at least 1. names: of the
    input's stretches of `stretch` tokens, see `Prompt`; empty: shares nothing with others."""

    arrival: float
    input_tokens: int
    output_tokens: int
    names: tuple[int, ...] = ()
    stretch: int = 512


@dataclass(slots=True, eq=False)
class Record:
    """One request's fate. Times are virtual seconds, None: never.

    placed: when it first got workers. prefill, decode: numbers of its last workers in their roles;
    prefill None: decode computed its prompt itself. cached_tokens: of its prompt, where it was
    computed. moved_tokens: whose KV was handed over. refused: why it got no answer, or "". gaps:
    times between its tokens, by class. last: of its newest token.
    """

    number: int
    request: Request
    placed: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefill: int | None = None
    decode: int | None = None
    cached_tokens: int = 0
    moved_tokens: int = 0
    attempts: int = 0
    tokens: int = 0
    refused: str = ""
    last: float = 0.0
    gaps: Counts = field(default_factory=dict)

    @property
    def first_token_s(self) -> float | None:
        """From arrival."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    def token(self, now: float) -> None:
        """One more; of an attempt that had to begin again only what is new counts."""
        if self.first_token is None:
            self.first_token = now
        else:
            which = class_of(now - self.last)
            self.gaps[which] = self.gaps.get(which, 0) + 1
        self.last = now
        self.tokens += 1

    def many(self, first: float, last: float, count: int, between: list[tuple[int, int]]) -> None:
        """So many tokens more, the first and the last of them at these times, and what lies between
        them by class."""
        self.token(first)
        for which, number in between:
            self.gaps[which] = self.gaps.get(which, 0) + number
        self.last = last
        self.tokens += count - 1
