"""The planner's loop: what it does with readings of routers; its options; what it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton_loadtest.autoscale.decide import PoolPolicy
from baton_loadtest.autoscale.forecast import BUCKET_S
from baton_loadtest.autoscale.process import ArrivalRate, Planner, PlannerConfig
from baton_loadtest.autoscale.readings import Reading, read, reading_of
from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.routing.scaling import Bounds
from batonlm.router.observe.gauges import POOL_TARGETS
from batonlm.rpc.metrics import REQUESTS_OPEN, gauge


@dataclass
class InMemory:
    """Pools that are not on a cluster. taken: another writer is always quicker. gone: pools that
    the cluster does not know. cut: answers to what is written are lost."""

    sizes: dict[str, int]
    said: list[str] = field(default_factory=list)
    taken: bool = False
    gone: frozenset[str] = frozenset()
    cut: bool = False

    def size(self, role: str) -> int:
        if role in self.gone:
            raise Unavailable("The cluster's API answers 404.")
        return self.sizes[role]

    def resize(self, role: str, before: int, after: int, why: str) -> bool:
        assert self.sizes[role] == before
        if self.taken:
            return False
        self.sizes[role] = after
        if self.cut:
            raise Unavailable("The cluster's API cannot be asked.")
        self.said.append(f"{role} {why}")
        return True


def planner(pools: InMemory, *, dry_run: bool = False, least: int = 1) -> Planner:
    policies = {role: PoolPolicy(Bounds(least, 8), 60.0) for role in pools.sizes}
    return Planner(policies, pools, 60.0, dry_run=dry_run)


def reading(prefill: float, decode: float, requests: float = 0.0) -> Reading:
    return Reading(1, {("m", "prefill"): prefill, ("m", "decode"): decode}, requests)


def test_pools_get_what_routers_ask_for_and_the_event_says_why() -> None:
    pools = InMemory({"prefill": 1, "decode": 2})
    one = planner(pools)
    one.look(0.0, reading(1, 4))
    assert pools.sizes == {"prefill": 1, "decode": 4}
    assert pools.said == ["decode from 2 to 4: routers ask for 4"]
    one.look(5.0, Reading(0))
    assert pools.sizes == {"prefill": 1, "decode": 4}, "routers that say nothing change nothing"


def test_pools_that_may_be_empty_go_to_nothing_and_come_back() -> None:
    pools = InMemory({"prefill": 1, "decode": 2})
    one = planner(pools, least=0)
    for at in range(0, 400, 5):
        one.look(float(at), reading(0, 0))
    assert pools.sizes == {"prefill": 0, "decode": 0}
    one.look(405.0, reading(0, 1))
    assert pools.sizes == {"prefill": 0, "decode": 1}


def test_each_models_pools_follow_what_is_asked_for_it() -> None:
    """Pools without a key are for whatever no other model is called."""
    options = PlannerConfig(
        release="baton",
        scale=("decode=1:8", "large-prefill=0:8", "large-decode=0:8"),
        models=("large=some/large",),
    )
    pools = InMemory({"decode": 1, "large-prefill": 1, "large-decode": 0})
    one = Planner(options.pools(), pools, 60.0, dry_run=False, models=options.names())
    asked = {("old", "decode"): 1.0, ("new", "decode"): 1.0}
    one.look(0.0, Reading(1, {**asked, ("some/large", "decode"): 1.0}))
    assert pools.sizes == {"decode": 2, "large-prefill": 1, "large-decode": 1}
    assert pools.said[1] == "large-decode from 0 to 1: routers ask for 1"


def test_a_dry_run_changes_nothing() -> None:
    pools = InMemory({"decode": 2})
    planner(pools, dry_run=True).look(0.0, reading(1, 4))
    assert pools.sizes == {"decode": 2} and not pools.said


def test_whoever_was_quicker_is_not_overwritten() -> None:
    pools = InMemory({"decode": 2}, taken=True)
    one = planner(pools)
    one.look(0.0, reading(1, 4))
    # Somebody has set it meanwhile, and it is kept.
    pools.sizes["decode"], pools.taken = 7, False
    one.look(5.0, reading(1, 4))
    one.look(100.0, reading(1, 1))
    assert pools.sizes == {"decode": 7}


def test_a_pool_that_is_gone_holds_up_no_other() -> None:
    pools = InMemory({"prefill": 1, "decode": 2}, gone=frozenset({"prefill"}))
    planner(pools).look(0.0, reading(4, 4))
    assert pools.sizes == {"prefill": 1, "decode": 4}


def test_a_size_of_its_own_is_not_taken_for_somebody_elses_when_the_answer_is_lost() -> None:
    pools = InMemory({"decode": 2}, cut=True)
    one = planner(pools)
    one.look(0.0, reading(1, 4))
    assert pools.sizes == {"decode": 4} and not pools.said
    pools.cut = False
    one.look(5.0, reading(1, 8))
    assert pools.sizes == {"decode": 8}
    # It is a change as others are: the pool does not shrink within the cool-down behind it.
    one, pools = planner(other := InMemory({"decode": 8}, cut=True)), other
    for at in (0.0, 61.0, 66.0):
        one.look(at, reading(1, 8 if not at else 1))
    assert pools.sizes == {"decode": 6}, "once, and not again 5 s later"


def test_a_new_planner_takes_pools_as_they_are() -> None:
    pools = InMemory({"decode": 5})
    planner(pools).look(0.0, reading(1, 5))
    planner(pools).look(5.0, reading(1, 5))
    assert pools.sizes == {"decode": 5} and not pools.said


def test_what_is_expected_grows_a_pool_before_routers_ask() -> None:
    """Yesterday the rate doubled at this time."""
    pools, now = InMemory({"decode": 4}), 86400.0 + 3600.0
    one = planner(pools)
    day = [
        (bucket * BUCKET_S, 4.0 if bucket * BUCKET_S < 3600.0 else 8.0) for bucket in range(1440)
    ]
    one.learn(day)
    one.learn((86400.0 + start, rate) for start, rate in day[:60])
    one.look(now - BUCKET_S, reading(1, 4))
    assert pools.sizes == {"decode": 8}
    assert "8.0 requests/s are expected, 2.00 times as many as now" in pools.said[0]


def test_arrivals_are_counted_by_the_minute_and_never_backwards() -> None:
    arrivals = ArrivalRate()
    counts = [(0.0, 1, 100.0), (30.0, 1, 160.0), (60.0, 1, 220.0), (90.0, 2, 9000.0)]
    # A router more, and then one that began anew: neither is traffic.
    counts += [(100.0, 2, 9060.0), (110.0, 2, 50.0), (125.0, 2, 60.0)]
    found = [
        bucket
        for now, routers, requests in counts
        for bucket in arrivals.buckets(now, Reading(routers, {}, requests))
    ]
    assert found == [(0.0, 2.0), (60.0, 70.0 / 60.0)]


def test_routers_are_read_and_the_most_counts() -> None:
    texts = []
    for target in (3.0, 5.0):
        registry = CollectorRegistry()
        targets = {("m", "prefill"): target, ("m", "decode"): 1.0}
        gauge(POOL_TARGETS, lambda targets=targets: targets, registry)  # type: ignore[misc]
        gauge(REQUESTS_OPEN, lambda: {(): 7.0}, registry)
        texts.append(generate_latest(registry).decode())
    found = reading_of([*texts, "nonsense {"])
    assert (found.routers, found.requests, found.target("prefill")) == (2, 14.0, 5.0)
    assert found.target("tokenizer") is None

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(texts[1].encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        found = read([f"127.0.0.1:{server.server_port}", "127.0.0.1:1"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (found.routers, found.target("prefill")) == (1, 5.0)
    assert read([]) == Reading(0)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"scale": ("prefill",)}, "scale"),
        ({"scale": ("tokenizer=1:2",)}, "scale"),
        ({"scale": ("decode=3:2",)}, "least"),
        ({"scale": ("decode=1:-2",)}, "scale"),
        ({"scale": ("large-decode=1:2",)}, "scale"),
        ({"scale": ("decode=1:2",), "models": ("large",)}, "models"),
        ({}, "scale"),
        ({"listen": "0.0.0.0:6443"}, "listen"),
        ({"scale": ("decode=1:2",), "tls_cert": "a", "tls_key": "b"}, "listen"),
    ],
)
def test_options_that_cannot_work(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        PlannerConfig(release="baton", **values)  # type: ignore[arg-type]
    assert caught.value.field == field
    policy = PlannerConfig(release="baton", scale=("prefill=0:3",)).pools()["prefill"]
    assert policy.bounds == Bounds(0, 3)
