"""Figures of a run: exact percentiles of all samples, objectives met, and whether the schedule was
kept.

Latencies are those of complete answers, from when the request was due. Refused, failed or unsent
requests have no latency and count as missing their objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton_loadtest.drive import ANSWERED, NOT_SENT, REFUSED, Run, Sample
from baton_loadtest.report import Result, at_most, quantile

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
BOUND_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds."""

    first_s: float = 2.0
    """To the first token."""
    between_s: float = 0.25
    """Mean between tokens."""
    lag_s: float = 0.01
    """If 99 % of requests are not sent within this time of being due, the schedule was not kept."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """In seconds, each in ascending order."""

    first: Sequence[float]
    first_left: Sequence[float]
    """To the first token, from when the request was sent."""
    between: Sequence[float]
    whole: Sequence[float]
    lag: Sequence[float]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Latencies:
        good = [sample for sample in samples if sample.end == ANSWERED]
        return cls(
            sorted(one.first_s - one.due_s for one in good),
            sorted(one.first_s - one.left_s for one in good),
            sorted(gap for one in good for gap in one.gaps_s),
            sorted(one.ended_s - one.due_s for one in good),
            sorted(one.lag_s for one in samples if one.sent),
        )


class Summary:
    """The figures of one run."""

    def __init__(self, run: Run, objectives: Objectives) -> None:
        self.run, self.objectives = run, objectives
        self.latencies = Latencies.of(run.samples)
        self.ends = Counter(sample.end for sample in run.samples)
        self.met = sum(
            sample.meets(objectives.first_s, objectives.between_s) for sample in run.samples
        )

    @property
    def due(self) -> int:
        return len(self.run.samples)

    @property
    def answered(self) -> int:
        return self.ends[ANSWERED]

    @property
    def share_met(self) -> float:
        """The share of all requests that were due. Turns that were never due, because their session
        had failed, do not count."""
        return self.met / self.due if self.due else 0.0

    @property
    def lag_s(self) -> float:
        return quantile(self.latencies.lag, BOUND_SHARE)

    @property
    def kept(self) -> bool:
        """Whether all requests were sent, 99 % of them in time."""
        return self.lag_s <= self.objectives.lag_s and not self.ends[NOT_SENT]

    @property
    def arriving_s(self) -> float:
        """The time to the last possible arrival, or to the last turn that was due later."""
        last = max((sample.due_s for sample in self.run.samples), default=0.0)
        return max(self.run.seconds, last) or 1.0

    @property
    def seconds(self) -> float:
        """The same, or the time to the last end if later."""
        return max(self.arriving_s, *(sample.ended_s for sample in self.run.samples), 0.0)

    def warnings(self) -> list[str]:
        """Returns notes that a reader of the figures needs."""
        warnings = []
        if self.run.stopped:
            warnings.append("Stopped before its end.")
        if self.lag_s > self.objectives.lag_s:
            warnings.append(
                "The schedule was not kept: 1 in 100 requests left "
                f"{1000 * self.lag_s:.1f} ms late or more, which is above "
                f"{1000 * self.objectives.lag_s:g} ms. This process could "
                "not do what was asked of it, and the latencies have its own delay in them."
            )
        if missing := self.ends[NOT_SENT]:
            warnings.append(
                f"{missing} of {self.due} requests were not sent: {self.run.most_open} were open."
            )
        if self.run.shortened:
            warnings.append(f"{self.run.shortened} requests were cut to fit, or left out for it.")
        if self.run.not_asked:
            warnings.append(
                f"{self.run.not_asked} further turns were not asked: the one before had failed, "
                "or time was up."
            )
        return warnings

    def results(self) -> list[Result]:
        samples, seconds, arriving = self.run.samples, self.seconds, self.arriving_s
        tokens = sum(sample.tokens for sample in samples)
        goals = self.objectives
        found = [
            Result("requests due", self.due, ""),
            Result("rate asked", self.due / arriving, "requests/s"),
            Result("answered", self.answered, ""),
            Result("rate answered", self.answered / seconds, "requests/s"),
            Result("refused", self.ends[REFUSED], ""),
            Result("not sent", self.ends[NOT_SENT], ""),
        ]
        known = (ANSWERED, REFUSED, NOT_SENT)
        for end, count in sorted(self.ends.items()):
            if end not in known:
                found.append(Result(f"failed: {end}", count, ""))
        found += [
            Result("open at a time, at most", self.run.most_open, ""),
            Result("prompt tokens", sum(one.prompt_tokens for one in samples if one.sent), ""),
            Result("output tokens", tokens, ""),
            Result("output tokens a second", tokens / seconds, "tokens/s"),
        ]
        for name, values in (
            ("first token", self.latencies.first),
            ("first token, from leaving", self.latencies.first_left),
            ("between tokens", self.latencies.between),
            ("end to end", self.latencies.whole),
        ):
            if values:
                found += [
                    Result(f"{name}, p{100 * share:g}", 1000 * quantile(values, share), "ms")
                    for share in SHARES
                ]
                found.append(Result(f"{name}, longest", 1000 * values[-1], "ms"))
        found += [
            Result("objective, first token", 1000 * goals.first_s, "ms"),
            Result("objective, between tokens on average", 1000 * goals.between_s, "ms"),
            Result("within objectives", 100 * self.share_met, "%"),
            Result("goodput", self.met / arriving, "requests/s"),
            at_most("left late, p99", 1000 * self.lag_s, "ms", 1000 * goals.lag_s),
            Result("left late, longest", 1000 * max(self.latencies.lag, default=0.0), "ms"),
            Result("schedule kept", int(self.kept), ""),
        ]
        return found
