"""What pods of the chart may do, as the API server decides it: admission and rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.chart_cluster import as_list, kubectl, namespace, told
from tests.k8s.charts import (
    CHART,
    COMPONENTS,
    CPU,
    ENGINES,
    GPU_SETS,
    VALUES_FILES,
    Json,
    of_kind,
    pods,
    render,
)

pytestmark = pytest.mark.k8s

TCP, RDMA = CHART / "values-gpu-tcp.yaml", CHART / "values-gpu-rdma.yaml"
NOT_RESTRICTED = {"gpu-rdma-values", "everything-values", "elsewhere-values", "models-values"}
ADMITTED = [CPU, TCP, *(path for path in VALUES_FILES if path.stem not in NOT_RESTRICTED)]


@pytest.fixture(scope="module")
def restricted() -> Iterator[str]:
    """A namespace under pod security "restricted", with the accounts that pods name."""
    with namespace(enforce="restricted") as here:
        for path in (CPU, CHART / "ci/image-volume-values.yaml"):
            accounts = of_kind(render(path, namespace=here), "ServiceAccount")
            told("apply", "-n", here, "-f", "-", given=as_list(accounts.values()))
        yield here


def asked(path: Path, here: str) -> dict[str, Json]:
    """Pods of a values file by component, as objects that can be created."""
    sets = GPU_SETS if path in (TCP, RDMA) else ()
    return {
        component: {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{path.stem}-{component}", "namespace": here},
            "spec": {"restartPolicy": "Always", **spec, "priorityClassName": None},
        }
        for component, spec in pods(render(path, sets=sets, namespace=here)).items()
    }


@pytest.mark.parametrize("path", ADMITTED, ids=lambda path: path.stem)
def test_restricted_pod_security_admits(restricted: str, path: Path) -> None:
    found = asked(path, restricted)
    assert set(found) > set(COMPONENTS)
    told("create", "--dry-run=server", "-f", "-", given=as_list(found.values()))


def test_restricted_pod_security_does_not_admit_rdma(restricted: str) -> None:
    """The one exception, and only for the two pools that have the device."""
    for component, pod in asked(RDMA, restricted).items():
        pod["spec"]["volumes"] = [v for v in pod["spec"]["volumes"] if "hostPath" not in v]
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            mounts = container["volumeMounts"]
            container["volumeMounts"] = [m for m in mounts if m["name"] != "models"]
        done = kubectl("create", "--dry-run=server", "-f", "-", given=as_list([pod]))
        assert bool(done.returncode) is (component in ENGINES), done.stderr
        if done.returncode:
            assert 'violates PodSecurity "restricted' in done.stderr
            assert "IPC_LOCK" in done.stderr


@pytest.fixture(scope="module")
def accounts() -> Iterator[dict[str, str]]:
    """Names of the accounts by component, with the rights that the chart gives them."""
    with namespace() as here:
        objects = render(CPU, namespace=here)
        kinds = ("ServiceAccount", "Role", "RoleBinding")
        wanted = [each for each in objects if each["kind"] in kinds]
        told("apply", "-f", "-", given=as_list(wanted))
        yield {
            component: f"system:serviceaccount:{here}:{each['metadata']['name']}"
            for component, each in of_kind(wanted, "ServiceAccount").items()
        }


FORBIDDEN = (
    ("list", "secrets"),
    ("get", "secrets"),
    ("list", "pods"),
    ("get", "configmaps"),
    ("create", "pods"),
    ("create", "pods/exec"),
    ("patch", "deployments.apps/scale"),
    ("update", "endpointslices.discovery.k8s.io"),
    ("delete", "endpointslices.discovery.k8s.io"),
    ("create", "serviceaccounts/token"),
    ("*", "*"),
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_no_account_reads_secrets_or_writes(accounts: dict[str, str], component: str) -> None:
    account = accounts[component]
    for verb, what in FORBIDDEN:
        assert not may(account, verb, what), (verb, what)


@pytest.mark.parametrize("component", COMPONENTS)
def test_only_a_router_sees_endpoints(accounts: dict[str, str], component: str) -> None:
    for verb in ("get", "list", "watch"):
        what = "endpointslices.discovery.k8s.io"
        assert may(accounts[component], verb, what) is (component == "router")


def test_a_router_sees_its_own_namespace_only(accounts: dict[str, str]) -> None:
    what = "endpointslices.discovery.k8s.io"
    assert not may(accounts["router"], "list", what, "kube-system")
    assert not may(accounts["router"], "list", "secrets", "kube-system")


def may(account: str, verb: str, what: str, where: str = "") -> bool:
    """As kubectl auth can-i says."""
    here = where or account.split(":")[2]
    resource, _, sub = what.partition("/")
    more = (f"--subresource={sub}",) if sub else ()
    done = kubectl("auth", "can-i", verb, resource, *more, "--as", account, "-n", here)
    assert done.stdout.strip() in ("yes", "no"), done.stderr
    return done.stdout.strip() == "yes"
