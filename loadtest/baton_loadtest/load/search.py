"""Looks for the highest rate that is still served well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from baton.core.errors import InvalidArgument


class Verdict(StrEnum):
    """Of one rate. UNKNOWN: who asked could not ask that much."""

    WELL = "within objectives"
    BADLY = "not within objectives"
    UNKNOWN = "schedule not kept"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Range:
    """Rates a second. resolution: the search ends when the lowest rate that was served badly is at
    most so much above the highest that was served well, as a share of it. first: where it begins;
    0: at the lowest. growth: from one rate to the next as long as only one of both is known."""

    lowest: float
    highest: float
    resolution: float = 0.05
    first: float = 0.0
    growth: float = 2.0

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
    """rate: the highest that was served well, None when even the lowest was not. above: the lowest
    that was not, and `limit` what it was instead; None when all were. tried: in that order."""

    rate: float | None
    above: float | None
    limit: Verdict | None
    tried: tuple[tuple[float, Verdict], ...]

    def said(self) -> str:
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
    """Raises the rate by `growth` until it is too much, or lowers it so until it is not, then
    halves the distance. Takes it that what is served well at one rate is so at lower ones; a rate
    that cannot be asked for counts as too much."""
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
