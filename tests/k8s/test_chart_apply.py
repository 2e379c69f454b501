"""A real API server takes every object of the chart, and is rid of them after uninstall."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.relay import eventually
from tests.k8s.chart_cluster import (
    api_resources,
    as_list,
    foreign_kinds,
    kubectl,
    namespace,
    told,
)
from tests.k8s.charts import (
    CHART,
    COMPONENTS,
    GPU_SETS,
    PRESETS,
    VALUES_FILES,
    Json,
    helm,
    render,
    stack,
)

pytestmark = pytest.mark.k8s

EVERYTHING = CHART / "ci/everything-values.yaml"
GONE_S = 200.0
PASSING = ("events", "endpointslices", "endpoints", "leases", "pods.metrics")
"""Kinds that the cluster itself keeps, and that follow what is asked for a moment later."""
ITS_OWN = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
"""What the cluster puts into every namespace, a moment after it was made."""


@pytest.fixture(scope="module", autouse=True)
def _kinds_of_others() -> Iterator[None]:
    with foreign_kinds():
        yield


def scalers(on: str, off: str) -> list[str]:
    """Every pool by one kind of autoscaler."""
    return [
        flag
        for component in COMPONENTS
        for flag in (f"{component}.{on}.enabled=true", f"{component}.{off}.enabled=false")
    ]


def apply(objects: list[Json]) -> None:
    told("apply", "--server-side", "--dry-run=server", "-f", "-", given=as_list(objects))


@pytest.mark.parametrize(("on", "off"), [("autoscaling", "keda"), ("keda", "autoscaling")])
def test_every_object_with_every_toggle_on_is_taken(on: str, off: str) -> None:
    with namespace() as here:
        apply(render(EVERYTHING, sets=scalers(on, off), namespace=here))


@pytest.mark.parametrize("path", [*VALUES_FILES, *PRESETS], ids=lambda path: path.stem)
def test_every_values_file_and_preset_is_taken(path: Path) -> None:
    sets = GPU_SETS if path.name.startswith("values-gpu") else ()
    with namespace() as here:
        apply(render(*stack(path), sets=sets, namespace=here))


def test_a_field_that_nobody_knows_is_not_taken() -> None:
    """Or the tests above would show nothing."""
    with namespace() as here:
        objects = render(EVERYTHING, namespace=here)
        deployment = next(each for each in objects if each["kind"] == "Deployment")
        deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
        done = kubectl(
            *("apply", "--server-side", "--dry-run=server", "-f", "-"),
            given=as_list([deployment]),
        )
    assert done.returncode
    assert "terminationGracePeriod" in done.stderr


def test_uninstall_leaves_nothing() -> None:
    with namespace() as here:
        before = everything_in(here)
        release = here
        helm(
            *("install", release, str(CHART), "-n", here, "-f", str(EVERYTHING)),
            *("--set", "image.pullPolicy=Never"),
        )
        during = everything_in(here)
        assert {kind for kind, _, _ in map(_parts, during - before)} > {"deployment", "certificate"}
        helm("uninstall", release, "-n", here)
        eventually(lambda: everything_in(here) <= before, GONE_S, f"{here} is as it was")
        for kind in ("priorityclasses", "clusterroles", "clusterrolebindings"):
            label = f"app.kubernetes.io/instance={release}"
            assert not told("get", kind, "-l", label, "-o", "name").split()


def everything_in(here: str) -> set[str]:
    """Names of all objects of a namespace but those that come and pass by themselves."""
    kinds = [
        kind
        for kind in api_resources("--namespaced", "--verbs=list")
        if not kind.startswith(PASSING)
    ]
    names = told("get", ",".join(kinds), "-n", here, "--ignore-not-found", "-o", "name").split()
    return set(names) - ITS_OWN


def _parts(name: str) -> tuple[str, str, str]:
    kind, _, rest = name.partition("/")
    return kind.partition(".")[0], kind, rest
