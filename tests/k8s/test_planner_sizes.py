"""The planner against a real API server: what it may set, and when it gives up a hand-set size.

Its clock is the tests' own, so quarters of an hour pass at once. No pod runs: the Deployment's are
for a node that does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from baton_loadtest.autoscale.cluster import Cluster as PlannersCluster
from baton_loadtest.autoscale.decide import HAND_S, PoolPolicy
from baton_loadtest.autoscale.process import LOOK_S, Planner
from baton_loadtest.autoscale.readings import Reading
from batonlm.core.routing.scaling import Bounds
from tests.k8s.cluster import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(300)]

POOL = "held-decode"


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[Cluster]:
    labels = {"app": POOL}
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": "no-such-node"},
        "containers": [{"name": "none", "image": "localhost/none"}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": POOL},
        "spec": {
            "replicas": 4,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    cluster.kubectl("create", "-f", "-", text=json.dumps(deployment))
    yield cluster
    cluster.kubectl("delete", f"deployment/{POOL}")


def test_a_hand_set_size_stays_for_its_time_and_no_longer(pool: Cluster) -> None:
    api = PlannersCluster("held", "test")
    api.namespace = pool.namespace
    planner = Planner({"decode": PoolPolicy(Bounds(1, 8))}, api, 30.0, dry_run=False)
    now = 1000.0

    def look(asked: float, until_s: float) -> int:
        """The size after so many seconds of looks."""
        nonlocal now
        end = now + until_s
        while now < end:
            now = min(end, now + 12 * LOOK_S)
            planner.look(now, Reading(1, {("m", "decode"): asked}))
        return api.size("decode")

    assert look(4, 200.0) == 4
    pool.kubectl("scale", f"deployment/{POOL}", "--replicas=6")
    assert look(2, HAND_S - 60.0) == 6, "the size that was set by hand is kept"
    assert look(8, 60.0) == 6, "also when more are asked for"
    # By a quarter at a time, each a cool-down behind the one before.
    assert look(2, 120.0 + 120.0) < 6
    assert look(2, 900.0) == 2
    found = pool.get("events", "--field-selector", f"involvedObject.name={POOL},reason=Scaled")
    told = {event["message"] for event in found["items"]}
    assert "from 3 to 2: routers ask for 2" in told, told
