"""`baton bench planner`: a day of recorded traffic on simulated fleets whose sizes the planner, an
HPA or nobody chooses.

The trace repeats for the day, thinned to a rate that rises and falls with the hour. The planner has
seen the day before, of the same form and drawn anew. Worker speeds are made up.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import pi, sin
from pathlib import Path
from random import Random

from baton_loadtest import TRACE, traces
from baton_loadtest.autoscale.decide import PoolPolicy
from baton_loadtest.autoscale.forecast import BUCKET_S
from baton_loadtest.autoscale.process import Planner
from baton_loadtest.autoscale.readings import Reading
from baton_loadtest.bench.options import option
from baton_loadtest.bench.simulator import KV_BYTES, SPEED
from baton_loadtest.launch import say
from baton_loadtest.report import Report, Result, compared
from baton_loadtest.simulator.autoscaler import Autoscaler, Choice, Seen
from baton_loadtest.simulator.requests import Record, Request
from baton_loadtest.simulator.settings import Delays, FleetFacts, WorkerFacts
from baton_loadtest.simulator.simulation import Simulation
from baton_loadtest.simulator.summary import Target
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.scaling import (
    Bounds,
    DecodeSignals,
    PrefillSignals,
    ScalingPolicy,
    ScalingRule,
)

PLOTS = False
OPTIONS = (
    option("--trace", str(TRACE), "recorded traffic"),
    option("--hours", 24.0, "of traffic"),
    option("--rate", 0.25, "requests a second, on average over a day"),
    option("--swing", 0.8, "share of it by which the rate rises and falls over a day"),
    option("--startup-s", 60.0, "of a worker"),
    option("--most", 8, "workers of each pool"),
)

TARGET = Target(5.0, 0.1)
SLOW = replace(SPEED, prefill_position_s=1.2e-3, step_s=0.06)
"""A low rate, which is quick to simulate, needs several workers then. Of both roles: routers would
let a decode worker that prefills faster compute most prompts."""
PREFILL = WorkerFacts(SLOW, 1000, 64, 2048)
DECODE = WorkerFacts(SLOW, 250, 64, 2048, 8)
HOLD_S = 60.0
"""As long as a router's target stays."""
DAY_S = 86400.0


def measure(args: argparse.Namespace) -> Report:
    if args.most < 1:
        raise InvalidArgument("must be at least 1", field="most")
    for name in ("hours", "rate"):
        if not 0.0 < getattr(args, name) < float("inf"):
            raise InvalidArgument("must be more than 0", field=name)
    if not 0.0 <= args.swing <= 1.0:
        raise InvalidArgument("must be from 0 to 1", field="swing")
    trace = traces.read(Path(args.trace)).requests
    before, traffic = (
        list(_traffic(args, trace, Random(f"planner {args.seed} {day}"), hours))
        for day, hours in (("before", 24.0), ("now", args.hours))
    )
    if not traffic:
        raise InvalidArgument("has no request in it: more hours, or a higher rate", field="rate")
    bounds = Bounds(1, args.most)
    policy = ScalingPolicy(
        TARGET.first_token_s, TARGET.token_s, lead_s=args.startup_s, hold_s=HOLD_S
    )
    days: list[tuple[str, Callable[[Simulation], Choice], int]] = [
        ("planner", lambda one: Planned(one, policy, bounds, args.startup_s, _rates(before)), 1),
        ("HPA", lambda _: ByHpa(policy, bounds), 1),
        ("always most", lambda _: Always(args.most), args.most),
    ]
    results = [Result("requests", len(traffic), "")]
    found = {}
    for name, choice, first in days:
        say(f"{name}, {len(traffic)} requests")
        found[name] = _run(traffic, choice, first, args.startup_s)
        results += found[name].results(name)
    planner, hpa = found["planner"], found["HPA"]
    results.append(
        compared("planner: worker time, against the HPA's", planner.worker_s, "s", hpa.worker_s)
    )
    return Report(results)


def _traffic(
    args: argparse.Namespace, trace: Sequence[traces.Recorded], draw: Random, hours: float
) -> Iterator[Request]:
    """Yields the trace over and over, in order, thinned to the rate of each moment."""
    trace = sorted(trace, key=lambda one: one.at_s)
    began = trace[0].at_s
    length = (trace[-1].at_s - began) * len(trace) / max(1, len(trace) - 1) or 1.0
    usual = len(trace) / length
    if args.rate * (1.0 + args.swing) > usual:
        raise InvalidArgument(
            f"is more, at its highest, than the {usual:.2f} requests/s of the trace", field="rate"
        )
    round_began = 0.0
    while round_began < 3600.0 * hours:
        for one in trace:
            at = round_began + one.at_s - began
            wanted = args.rate * (1.0 - args.swing * sin(2 * pi * (at / DAY_S + 0.25)))
            if at < 3600.0 * hours and draw.random() < wanted / usual:
                # No prompt shares anything with another: a part of a thinned trace would.
                yield Request(at, one.prompt_tokens, one.output_tokens)
        round_began += length


def _rates(traffic: Sequence[Request]) -> list[tuple[float, float]]:
    counts = Counter(int(request.arrival / BUCKET_S) for request in traffic)
    return [
        (bucket * BUCKET_S, counts[bucket] / BUCKET_S) for bucket in range(int(DAY_S / BUCKET_S))
    ]


@dataclass(frozen=True, slots=True)
class Day:
    """What became of the traffic with one way to choose sizes."""

    records: Sequence[Record]
    worker_s: float
    """Total time of all workers."""
    changes: int
    """Of the paid workers of either pool, up or down, between two checks."""
    seconds: float

    def results(self, name: str) -> list[Result]:
        total = len(self.records)
        met = sum(TARGET.met(record) for record in self.records)
        refused = sum(bool(record.refused) for record in self.records)
        return [
            Result(f"{name}: requests within the targets", 100 * met / total, "%"),
            Result(f"{name}: refused", 100 * refused / total, "%"),
            Result(f"{name}: workers, mean", self.worker_s / self.seconds, ""),
            Result(f"{name}: changes of a size", self.changes, ""),
        ]


def _run(
    traffic: Sequence[Request], choice: Callable[[Simulation], Choice], first: int, startup_s: float
) -> Day:
    """first: the initial number of workers in each pool."""
    facts = FleetFacts(
        PREFILL, DECODE, first, first, KV_BYTES, delays=Delays(report_s=0.25, heartbeat_s=5.0)
    )
    simulation = Simulation(facts)
    sizes: list[tuple[int, int]] = []
    ended = [0.0]

    def check(now: float, prefills: int, decodes: int) -> None:
        if not sizes or sizes[-1] != (prefills, decodes):
            sizes.append((prefills, decodes))
        ended[0] = now

    scaler = Autoscaler(simulation, facts, choice(simulation), startup_s=startup_s, on_check=check)
    records = simulation.run(traffic).records
    return Day(records, scaler.worker_s, len(sizes) - 1, ended[0])


class Planned:
    """The planner's own loop, for each pool, with the rule in the place of routers."""

    def __init__(
        self,
        simulation: Simulation,
        policy: ScalingPolicy,
        bounds: Bounds,
        startup_s: float,
        before: Sequence[tuple[float, float]],
    ) -> None:
        """before: the arrivals of the day before, as `Planner.learn` takes them."""
        self._simulation = simulation
        self._rule = ScalingRule(policy, Bounds(0, 1000), Bounds(1, 1000))
        self._sizes = {"prefill": 0, "decode": 0}
        self._planners = {
            role: Planner({role: PoolPolicy(bounds)}, self, startup_s, dry_run=False)
            for role in self._sizes
        }
        for planner in self._planners.values():
            planner.learn(before)

    def prefill(self, now: float, seen: Seen, signals: PrefillSignals) -> int:
        return self._look("prefill", now, seen, self._rule.prefill(now, signals))

    def decode(self, now: float, seen: Seen, signals: DecodeSignals) -> int:
        return self._look("decode", now, seen, self._rule.decode(now, signals))

    def size(self, role: str) -> int:
        return self._sizes[role]

    def resize(self, role: str, before: int, after: int, why: str) -> bool:
        self._sizes[role] = after
        return True

    def _look(self, role: str, now: float, seen: Seen, asked: int) -> int:
        self._sizes[role] = seen.workers
        reading = Reading(1, {("m", role): float(asked)}, float(self._simulation.num_arrived))
        self._planners[role].look(now, reading)
        return self._sizes[role]


class ByHpa:
    """An HPA with Kubernetes' defaults that follows what routers ask for."""

    TOLERANCE = 0.1
    STABLE_S = 300.0
    AT_ONCE = 4
    """Pods by which it grows in a period, or twice what there is."""

    def __init__(self, policy: ScalingPolicy, bounds: Bounds) -> None:
        self._rule = ScalingRule(policy, Bounds(0, 1000), Bounds(1, 1000))
        self._bounds = bounds
        self._past: dict[str, deque[tuple[float, int]]] = {"prefill": deque(), "decode": deque()}

    def prefill(self, now: float, seen: Seen, signals: PrefillSignals) -> int:
        return self._size(self._past["prefill"], now, seen, self._rule.prefill(now, signals))

    def decode(self, now: float, seen: Seen, signals: DecodeSignals) -> int:
        return self._size(self._past["decode"], now, seen, self._rule.decode(now, signals))

    def _size(self, past: deque[tuple[float, int]], now: float, seen: Seen, asked: int) -> int:
        size = seen.workers
        wanted = size if abs(asked - size) <= self.TOLERANCE * size else asked
        past.append((now, wanted))
        while past[0][0] < now - self.STABLE_S:
            past.popleft()
        if wanted < size:
            wanted = min(size, max(one for _, one in past))
        return self._bounds.within(min(wanted, max(2 * size, size + self.AT_ONCE)))


class Always:
    """Keeps the number of workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def prefill(self, *_: object) -> int:
        return self._workers

    def decode(self, *_: object) -> int:
        return self._workers
