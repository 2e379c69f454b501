"""Searches the highest rate that a server sustains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from batonlm.core.errors import InvalidArgument


class Verdict(StrEnum):
    """Of one rate. UNKNOWN: this process could not send that many requests."""

    WELL = "within objectives"
    BADLY = "not within objectives"
    UNKNOWN = "schedule not kept"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a search, in rates per second."""

    lowest: float
    highest: float
    resolution: float = 0.05
    """The search ends when the lowest bad rate is at most this share above the highest good
    rate."""
    first: float = 0.0
    """The first rate; 0: the lowest."""
    growth: float = 2.0
    """Factor between rates while only a good or only a bad rate is known."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument, and ValueError for rates that do not grow."""
        if not self.growth > 1:
            raise ValueError("growth must be above 1")
        if not 0 < self.lowest < float("inf"):
            raise InvalidArgument("must be a rate above 0", field="search_from")
        if not self.lowest < self.highest < float("inf"):
            raise InvalidArgument("must be above --search-from", field="search_to")
        if not 0.001 <= self.resolution <= 1:
            raise InvalidArgument("must be from 0.001 to 1", field="search_step")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    rate: float | None
    """The highest good rate; None if even the lowest was bad."""
    above: float | None
    """The lowest bad rate; None if all were good."""
    limit: Verdict | None
    """The verdict at `above`."""
    tried: tuple[tuple[float, Verdict], ...]
    """In order."""

    def conclusion(self) -> str:
        lowest, last = self.tried[-1]
        if last is Verdict.STOPPED:
            return "Stopped before the search ended."
        if self.rate is None and self.limit is Verdict.UNKNOWN:
            return f"Not even the lowest rate, {lowest:g} a second, could be asked for in time."
        if self.rate is None:
            return f"Even the lowest rate, {lowest:g} a second, is not within objectives."
        if self.above is None:
            return f"At least {self.rate:.4g} a second, the highest rate that was to be tried."
        if self.limit is Verdict.UNKNOWN:
            return (
                f"At least {self.rate:.4g} a second: {self.above:.4g} could not be asked for in "
                "time from here."
            )
        return f"Highest rate: {self.rate:.4g} a second; {self.above:.4g} is too much."


async def highest(bounds: Range, probe: Callable[[float], Awaitable[Verdict]]) -> Found:
    """Raises the rate by `growth` until it is bad, or lowers it until it is good, then bisects.
    Assumes that every rate below a good one is good. A rate that cannot be generated counts as
    bad."""
    tried: list[tuple[float, Verdict]] = []
    good: float | None = None
    bad: float | None = None
    limit: Verdict | None = None
    rate = bounds.first or bounds.lowest
    while True:
        verdict = await probe(rate)
        tried.append((rate, verdict))
        if verdict is Verdict.STOPPED:
            break
        if verdict is Verdict.WELL:
            good = rate
        else:
            bad, limit = rate, verdict
        if good is None:
            if rate <= bounds.lowest:
                break
            rate = max(rate / bounds.growth, bounds.lowest)
        elif good >= bounds.highest:
            break
        elif bad is None:
            rate = min(bounds.growth * good, bounds.highest)
        elif bad <= good * (1 + bounds.resolution):
            break
        else:
            rate = (good + bad) / 2
    return Found(good, bad, limit, tuple(tried))
