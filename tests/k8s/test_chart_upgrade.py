"""Who says how many pods there are: values, kubectl scale and autoscalers, over upgrades.

No pod has to run for this: the images need not be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.k8s.chart_cluster import namespace, told
from tests.k8s.charts import CHART, CPU, helm

pytestmark = pytest.mark.k8s

RELEASE = "baton"


@pytest.fixture
def here() -> Iterator[str]:
    """A namespace with Baton in it, two decode pods asked for."""
    with namespace() as name:
        run(name, "install", "decode.replicaCount=2")
        yield name
        helm("uninstall", RELEASE, "-n", name)


def run(here: str, verb: str, *sets: str, more: tuple[str, ...] = ()) -> None:
    flags = [part for each in ("image.pullPolicy=Never", *sets) for part in ("--set", each)]
    helm(verb, RELEASE, str(CHART), "-n", here, "-f", str(CPU), *flags, *more)


def asked_for(here: str, component: str) -> int:
    said = told("get", "deployment", f"baton-{component}", "-n", here, "-o", "json")
    return int(json.loads(said)["spec"]["replicas"])


def scale(here: str, component: str, number: int) -> None:
    told("scale", "-n", here, f"deployment/baton-{component}", f"--replicas={number}")


def test_values_say_how_many_pods_there_are(here: str) -> None:
    assert asked_for(here, "decode") == 2
    run(here, "upgrade", "decode.replicaCount=4")
    assert asked_for(here, "decode") == 4


def test_an_upgrade_leaves_a_scaled_pool_as_it_is(here: str) -> None:
    for number in (3, 1):
        scale(here, "decode", number)
        run(here, "upgrade", "decode.replicaCount=2", f"router.config.max_requests={number}")
        assert asked_for(here, "decode") == number


def test_prefill_scaled_to_none_stays_so(here: str) -> None:
    scale(here, "prefill", 0)
    for number in (7, 8):
        run(here, "upgrade", f"router.config.max_requests={number}")
        assert asked_for(here, "prefill") == 0


def test_values_can_be_put_in_force_again(here: str) -> None:
    scale(here, "decode", 5)
    run(here, "upgrade", "keepScaled=false", more=("--force-conflicts",))
    assert asked_for(here, "decode") == 1
    run(here, "upgrade", "decode.replicaCount=3")
    assert asked_for(here, "decode") == 3


def test_a_pool_keeps_its_pods_when_it_gets_an_autoscaler(here: str) -> None:
    scaler = ("tokenizer.autoscaling.enabled=true", "tokenizer.autoscaling.minReplicas=3")
    run(here, "upgrade", "tokenizer.replicaCount=3")
    run(here, "upgrade", "tokenizer.replicaCount=3", *scaler)
    assert asked_for(here, "tokenizer") == 3
    # As the autoscaler does it.
    scale(here, "tokenizer", 4)
    run(here, "upgrade", "tokenizer.replicaCount=3", *scaler, "router.config.max_requests=7")
    assert asked_for(here, "tokenizer") == 4
