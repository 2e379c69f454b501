"""`baton-planner`: reads the routers every few seconds, and serves what they ask for to HPAs or
scales prefill and decode itself.

It holds no state that a new one would miss: when it ends, pools keep their sizes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from baton_loadtest.autoscale.cluster import Cluster
from baton_loadtest.autoscale.decide import PoolPlan, PoolPolicy
from baton_loadtest.autoscale.forecast import BUCKET_S, Forecast
from baton_loadtest.autoscale.metrics_api import MetricsApi, MetricsServer
from baton_loadtest.autoscale.readings import Reading, read
from batonlm.core.errors import BatonError, InvalidArgument, Unavailable
from batonlm.core.routing.scaling import Bounds
from batonlm.rpc import config, logs
from batonlm.rpc.address import split
from batonlm.rpc.config import option

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Interval between two readings, and between two decisions."""
ROLES = ("prefill", "decode")
MOST = 1000


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """One planner."""

    release: str = option("", "what the names of the release's objects begin with", required=True)
    listen: str = option(
        "", "where external.metrics.k8s.io is served to the API server; empty: nowhere",
        unit="host:port",
    )  # fmt: skip
    tls_cert: str = option("", "PEM file: the certificate of listen", unit="file")
    tls_key: str = option("", "PEM file: its key", unit="file")
    scale: tuple[str, ...] = option(
        (),
        "pools that it scales itself, as role=least:most (prefill=1:8), with the key of one of "
        "`models` before the role (large-decode=0:4); empty: none",
    )
    models: tuple[str, ...] = option(
        (),
        "models that have pools of their own, as key=name; pools without a key are for all others",
    )
    dry_run: bool = option(False, "only log what it would do")
    startup_s: float = option(
        30.0, "time that a new worker takes to start: how far ahead it plans", unit="s", minimum=0.0
    )
    cool_down_s: float = option(
        120.0, "a pool shrinks to the most that it needed within this time", unit="s", minimum=0.0
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        if bool(self.listen) != bool(self.tls_cert and self.tls_key):
            raise InvalidArgument("needs tls_cert and tls_key, and they need it", field="listen")
        if not self.listen and not self.scale:
            raise InvalidArgument("must name a pool where listen is empty", field="scale")
        self.pools()

    def pools(self) -> dict[str, PoolPolicy]:
        """Returns the policy of each pool that is scaled. Raises InvalidArgument."""
        found, keys = {}, self.names().keys() | {""}
        for text in self.scale:
            pool, _, bounds = text.partition("=")
            least, _, most = bounds.partition(":")
            key, _, role = pool.rpartition("-")
            if role not in ROLES or not (least.isdecimal() and most.isdecimal()):
                raise InvalidArgument(
                    f"{text!r} must be prefill=least:most or decode=least:most", field="scale"
                )
            if key not in keys:
                raise InvalidArgument(f"{text!r} is of a model that is not there", field="scale")
            found[pool] = PoolPolicy(Bounds(int(least), min(MOST, int(most))), self.cool_down_s)
        return found

    def names(self) -> dict[str, str]:
        """Returns the names of `models` by key. Raises InvalidArgument."""
        found = {key: name for key, _, name in (text.partition("=") for text in self.models)}
        if not all(key and name for key, name in found.items()):
            raise InvalidArgument("must be key=name, …", field="models")
        return found


class Pools(Protocol):
    """The part of `Cluster` that sizes are read from and written to. pool: a role, behind the key
    of its model where it is one of `models`."""

    def size(self, pool: str) -> int: ...

    def resize(self, pool: str, before: int, after: int, why: str) -> bool: ...


class Planner:
    """Scales pools by what routers ask for now and by what is forecast. Call `look` repeatedly."""

    def __init__(
        self,
        policies: Mapping[str, PoolPolicy],
        pools: Pools,
        startup_s: float,
        *,
        dry_run: bool,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """policies: by pool. models: names of models with pools of their own, by key."""
        self._plans = {pool: PoolPlan(policy) for pool, policy in policies.items()}
        self._models = dict(models or {})
        self._pools, self._startup_s, self._dry_run = pools, startup_s, dry_run
        self._arrivals = ArrivalRate()
        self._forecast = Forecast(max(BUCKET_S, startup_s))

    def learn(self, buckets: Iterable[tuple[float, float]]) -> None:
        """Takes (start, arrivals per second) of past buckets of BUCKET_S, in order."""
        for start, rate in buckets:
            self._forecast.see(start, rate)

    def look(self, now: float, reading: Reading) -> None:
        """Decides with this reading. now: seconds since the epoch. A pool about which the cluster
        cannot be asked stays as it is, and holds up no other."""
        self.learn(self._arrivals.buckets(now, reading))
        growth, rate = self._growth(now)
        expected = ""
        if growth > 1.0:
            expected = (
                f", and {rate:.1f} requests/s are expected, {growth:.2f} times as many as now"
            )
        for pool, plan in self._plans.items():
            key, _, role = pool.rpartition("-")
            asked = reading.target(role, self._models.get(key, ""), self._models.values())
            if asked is None:
                continue
            # Half a worker more than routers ask for is none: they leave room already.
            need = round(asked * growth)
            try:
                self._decide(pool, plan, now, need, f"routers ask for {asked:.0f}{expected}")
            except Unavailable as error:
                log.warning("%s", error.message)

    def _decide(self, pool: str, plan: PoolPlan, now: float, need: int, reason: str) -> None:
        """Raises Unavailable."""
        size = self._pools.size(pool)
        decision = plan.decide(now, size, need, reason)
        if decision.size == size:
            log.debug("%s %s", pool, decision.why)
        elif self._dry_run:
            log.info("would scale %s %s", pool, decision.why)
        elif self._pools.resize(pool, size, decision.size, decision.why):
            plan.done(now, decision.size)
            log.info("scaled %s %s", pool, decision.why)

    def _growth(self, now: float) -> tuple[float, float]:
        """Returns what is expected by the time that a new worker has started, by what comes now (1
        at least), and the rate that is expected."""
        rate = self._forecast.at(now, 0.0)
        ahead = self._forecast.at(now, 2 * self._startup_s)
        return (max(1.0, ahead / rate) if rate > 0.0 else 1.0), ahead


class ArrivalRate:
    """Arrivals per second in buckets, from counters that start again when a router does."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._count = 0.0
        self._before: tuple[int, float] | None = None

    def buckets(self, now: float, reading: Reading) -> list[tuple[float, float]]:
        """Returns (start, arrivals per second) of the bucket that is complete, if one is. Readings
        of another number of routers than before are compared with nothing."""
        start = now - now % BUCKET_S
        if self._before is not None and self._before[0] == reading.routers:
            self._count += max(0.0, reading.requests - self._before[1])
        self._before = (reading.routers, reading.requests)
        if self._start is None or start == self._start:
            self._start = start
            return []
        found = [(self._start, self._count / BUCKET_S)]
        self._start, self._count = start, 0.0
        return found


def run(options: PlannerConfig, stop: threading.Event) -> int:
    """Runs until `stop` is set. Raises BatonError for what is wrong at the start."""
    identity = os.environ.get("HOSTNAME", "planner")
    cluster = Cluster(options.release, identity)
    policies = options.pools()
    owners = cluster.autoscaled() if policies else {}
    for pool in policies:
        owner = owners.get(f"{options.release}-{pool}")
        if owner is not None:
            raise InvalidArgument(
                f"{pool} is scaled by the autoscaler {owner} already", field="scale"
            )
    planner = Planner(
        policies, cluster, options.startup_s, dry_run=options.dry_run, models=options.names()
    )
    api = MetricsApi(cluster.namespace, f"{options.release}-router-metrics")
    server = None
    if options.listen:
        address = split(options.listen, "listen")
        try:
            server = MetricsServer(
                address, options.tls_cert, options.tls_key, cluster.front_proxy(), api
            )
        except OSError as error:
            raise InvalidArgument(f"cannot be served: {error.strerror}", field="listen") from None
        log.info("external metrics of %s are served on port %d", cluster.namespace, server.port)
    try:
        while not stop.is_set():
            began = time.monotonic()
            try:
                reading = read(cluster.routers())
                if reading.targets:
                    api.publish(reading, time.time())
                if policies and cluster.leads():
                    _refuse_owned(options.release, policies, cluster.autoscaled())
                    planner.look(time.time(), reading)
            except Owned as owned:
                log.warning("%s", owned)
            except BatonError as error:
                log.warning("%s", error.message)
            stop.wait(max(0.0, LOOK_S - (time.monotonic() - began)))
    finally:
        if server is not None:
            server.close()
    return 0


class Owned(Exception):
    """An autoscaler has appeared that scales a pool of the planner's, which therefore waits."""


def _refuse_owned(
    release: str, policies: Mapping[str, PoolPolicy], owners: Mapping[str, str]
) -> None:
    for pool in policies:
        owner = owners.get(f"{release}-{pool}")
        if owner is not None:
            raise Owned(f"nothing is scaled while the autoscaler {owner} scales {pool}, too")


def main() -> int:
    options = config.load(PlannerConfig, prog="baton-planner")
    logs.setup("planner", options.log_level, options.log_json)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return run(options, stop)
    except BatonError as error:
        print(
            f"error: {error.field}: {error.message}" if error.field else f"error: {error.message}",
            file=sys.stderr,
        )
        return 3


if __name__ == "__main__":
    sys.exit(main())
