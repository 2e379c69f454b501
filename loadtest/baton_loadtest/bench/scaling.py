"""`baton bench scaling`: bursts of traffic on simulated fleets that scale by core's rule and by
utilisation, with made-up worker speeds.

The same bursts also run on fleets that always have the maximum size, or one worker of each role.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from baton_loadtest.bench.options import option
from baton_loadtest.bench.simulator import KV_BYTES, SPEED
from baton_loadtest.launch import say
from baton_loadtest.load.scenario import Arrivals, Kind, named
from baton_loadtest.report import Chart, Line, Report, Result, quantile
from baton_loadtest.simulator.autoscaler import Autoscaler, Choice, Leading, Reactive
from baton_loadtest.simulator.requests import Record, Request
from baton_loadtest.simulator.settings import FleetFacts, WorkerFacts
from baton_loadtest.simulator.simulation import Simulation
from baton_loadtest.simulator.summary import Target
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.scaling import Bounds, ScalingPolicy, ScalingRule

PLOTS = True
OPTIONS = (
    option("--seconds", 900.0, "of traffic"),
    option("--rate", 2.0, "requests a second"),
    option("--burst-rate", 10.0, "in a burst"),
    option("--burst-s", 120.0, "that one lasts"),
    option("--period-s", 300.0, "between two"),
    option("--startup-s", 30.0, "of a worker"),
    option("--hold-s", 300.0, "that a pool stays as large as it had to be (as an HPA)"),
    option("--most", 8, "workers of each pool"),
)

TARGET = Target(2.0, 0.05)
BUSY = 0.7
PREFILL = WorkerFacts(replace(SPEED, prefill_position_s=1e-4), 4000, 64, 8192)
DECODE = WorkerFacts(SPEED, 1000, 64, 2048, 64)
"""Slow and small enough that bursts of chat need several."""

WINDOW_S = 15.0
"""Duration of one point in a chart."""


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """The results of one fleet."""

    name: str
    records: Sequence[Record]
    worker_s: float
    """Total time of all workers."""
    paid: Sequence[tuple[float, float]]
    """(time, workers of both pools) at each check."""

    @property
    def share_met(self) -> float:
        return sum(TARGET.met(record) for record in self.records) / len(self.records)

    def first_token_s(self, share: float) -> float:
        """Of requests that had a first token."""
        waits = (record.first_token_s for record in self.records)
        return quantile([wait for wait in waits if wait is not None], share)

    def results(self) -> list[Result]:
        refused = sum(bool(record.refused) for record in self.records)
        return [
            Result(f"{self.name}: requests within the targets", 100 * self.share_met, "%"),
            Result(f"{self.name}: first token, p99", self.first_token_s(0.99), "s"),
            Result(f"{self.name}: refused", 100 * refused / len(self.records), "%"),
            Result(f"{self.name}: workers, mean", self.worker_s / self.paid[-1][0], ""),
            Result(f"{self.name}: workers, most", max(count for _, count in self.paid), ""),
        ]


def measure(args: argparse.Namespace) -> Report:
    if args.most < 1:
        raise InvalidArgument("must be at least 1", field="most")
    for name in ("startup_s", "hold_s"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise InvalidArgument("must not be below 0", field=name)
    traffic = _traffic(args)
    bounds = Bounds(1, args.most)
    policy = ScalingPolicy(
        TARGET.first_token_s,
        TARGET.token_s,
        BUSY,
        lead_s=args.startup_s,
        hold_s=args.hold_s,
    )
    contenders: list[tuple[str, int, Callable[[], Choice] | None]] = [
        ("leading", 1, lambda: Leading(ScalingRule(policy, bounds, bounds))),
        ("reactive", 1, lambda: Reactive(bounds, bounds, BUSY, args.hold_s)),
        ("always most", args.most, None),
        ("always 1", 1, None),
    ]
    found = []
    for name, first, choice in contenders:
        say(f"{name}, {len(traffic)} requests")
        found.append(_run(name, traffic, first, choice() if choice else None, args.startup_s))
    scaled = [one for one in found if not one.name.startswith("always")]
    return Report(
        [
            Result("requests", len(traffic), ""),
            *(result for one in found for result in one.results()),
        ],
        (_workers(scaled), _first_tokens(scaled), _arrivals(traffic)),
    )


def _traffic(args: argparse.Namespace) -> list[Request]:
    """Returns chat traffic in bursts."""
    draw, lengths = Random(f"scaling {args.seed}"), named("chat")
    arrivals = Arrivals(
        Kind.BURSTS,
        rate=args.rate,
        seconds=args.burst_s + args.seconds,
        burst_rate=args.burst_rate,
        burst_s=args.burst_s,
        period_s=args.period_s,
    )
    # The initial burst is removed, because it would be a cold start. Each period ends with one.
    times = [at - args.burst_s for at in arrivals.times(draw) if at >= args.burst_s]
    if not times:
        raise InvalidArgument("has no request in it: more seconds, or a higher rate", field="rate")
    return [
        Request(at, lengths.prompt.draw(draw, 1.0), lengths.output.draw(draw, 1.0)) for at in times
    ]


def _run(
    name: str, traffic: Sequence[Request], first: int, choice: Choice | None, startup_s: float
) -> ScaledFleet:
    """first: the initial number of workers in each pool."""
    facts = FleetFacts(PREFILL, DECODE, first, first, KV_BYTES)
    simulation = Simulation(facts)
    paid: list[tuple[float, float]] = []
    scaler = Autoscaler(
        simulation,
        facts,
        choice or _Fixed(first),
        startup_s=startup_s,
        on_check=lambda now, prefills, decodes: paid.append((now, prefills + decodes)),
    )
    records = simulation.run(traffic).records
    return ScaledFleet(name, records, scaler.worker_s, paid)


class _Fixed:
    """Keeps the number of workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def prefill(self, *_: object) -> int:
        return self._workers

    def decode(self, *_: object) -> int:
        return self._workers


def _workers(found: Sequence[ScaledFleet]) -> Chart:
    lines = [
        Line(one.name, [now for now, _ in one.paid], [count for _, count in one.paid])
        for one in found
    ]
    return Chart("Workers that serve, start or leave", "seconds", "workers", tuple(lines))


def _first_tokens(found: Sequence[ScaledFleet]) -> Chart:
    """By time of the request's arrival."""
    lines = []
    for one in found:
        windows: dict[int, list[float]] = defaultdict(list)
        for record in one.records:
            if record.first_token_s is not None:
                windows[int(record.request.arrival / WINDOW_S)].append(record.first_token_s)
        times = sorted(windows)
        waits = [quantile(windows[window], 0.9) for window in times]
        lines.append(Line(one.name, [WINDOW_S * window for window in times], waits))
    return Chart("First token, 9 of 10 within", "seconds", "seconds", tuple(lines))


def _arrivals(traffic: Sequence[Request]) -> Chart:
    counts = Counter(int(request.arrival / WINDOW_S) for request in traffic)
    windows = range(max(counts) + 1)
    rates = [counts[window] / WINDOW_S for window in windows]
    line = Line("arrivals", [WINDOW_S * window for window in windows], rates)
    return Chart("Traffic", "seconds", "requests/s", (line,))
