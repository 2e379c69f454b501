"""`baton doctor cluster` on a real cluster: from outside with a kubeconfig, and as a Job inside."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batonlm.cli import doctor
from tests.e2e.relay import eventually
from tests.k8s import chart_cluster
from tests.k8s.chart_cluster import as_list, told
from tests.k8s.charts import CHART
from tests.k8s.conftest import CPU_IMAGE

pytestmark = pytest.mark.k8s

DOCTOR = CHART.parents[1] / "k8s" / "doctor"
PATIENCE_S = 120

Checks = dict[str, dict[str, str]]


def apply(namespace: str, *objects: dict[str, Any]) -> None:
    items = [{**one, "metadata": {**one["metadata"], "namespace": namespace}} for one in objects]
    told("apply", "-f", "-", given=as_list(items))


@pytest.fixture
def namespace() -> Iterator[str]:
    assert shutil.which("kubectl"), "kubectl is needed"
    with chart_cluster.namespace(enforce="restricted") as name:
        yield name


def asked(capsys: pytest.CaptureFixture[str], namespace: str, *argv: str) -> tuple[int, Checks]:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", "cluster", "--json", "--namespace", namespace, *argv])
    capsys.readouterr()
    code = doctor.run(args)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, {check["name"]: check for check in found["checks"]}


def test_an_empty_namespace_from_outside(
    namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(capsys, namespace)
    assert code == 0, found
    assert "v1." in found["api"]["detail"]
    assert "'restricted'" in found["namespace"]["detail"]
    assert found["pods"]["detail"] == "none is installed here"
    assert "dns" not in found, "that is seen from inside only"


def test_what_rdma_needs_is_missed(namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "rdma/" in told("get", "nodes", "-o", "jsonpath={.items[*].status.allocatable}"):
        pytest.skip("this cluster has RDMA")
    code, found = asked(capsys, namespace, "--preset", "gpu-rdma")
    assert code == 1
    assert {name for name, check in found.items() if check["status"] == "fail"} >= {
        "namespace",
        "rdma",
    }


def test_a_namespace_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = asked(capsys, "doctor-of-nobody")
    assert code == 0 and found["namespace"]["status"] == "warn"


def test_the_routers_rights_are_its_service_accounts(
    namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those of whoever asks, who may do anything here."""
    told("-n", namespace, "create", "serviceaccount", "r")
    code, found = asked(capsys, namespace, "--service-account", "r")
    assert code == 1 and "list" in found["router access"]["detail"]
    verbs, what = "--verb=get,list,watch", "--resource=endpointslices.discovery.k8s.io"
    told("-n", namespace, "create", "role", "r", verbs, what)
    bound = f"--serviceaccount={namespace}:r"
    told("-n", namespace, "create", "rolebinding", "r", "--role=r", bound)

    def granted() -> bool:
        return asked(capsys, namespace, "--service-account", "r")[0] == 0

    eventually(granted, PATIENCE_S, "the role to count")


def pod(name: str, component: str, image: str, *command: str, **spec: Any) -> dict[str, Any]:
    """As restricted pod security wants it, with the chart's labels."""
    labels = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": component}
    container = {
        "name": component,
        "image": image,
        "imagePullPolicy": "Never" if "no-such" in image else "IfNotPresent",
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    secure = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"securityContext": secure, "containers": [container], **spec},
    }


def test_why_pods_are_not_ready(namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    apply(
        namespace,
        pod("d", "decode", "localhost/no-such:1", "true"),
        pod("p", "prefill", CPU_IMAGE, "true", nodeSelector={"no-such": "node"}),
        pod("t", "tokenizer", CPU_IMAGE, "baton-tokenizer", "--no-such-option"),
    )
    words = ("ErrImageNeverPull", "node", "ended with code 2")

    def explained() -> bool:
        code, found = asked(capsys, namespace)
        detail = found["pods"]["detail"]
        return code == 1 and all(word in detail for word in words)

    eventually(explained, PATIENCE_S, str(words))


JOB = "baton-doctor-tried"


@pytest.fixture(params=[False, True], ids=["rights in its namespace", "rights in the cluster"])
def job(request: pytest.FixtureRequest, namespace: str, tmp_path: Path) -> Iterator[bool]:
    """What deploy/k8s/doctor makes, in a namespace of another name; is it allowed to see nodes?"""
    repository, _, tag = CPU_IMAGE.rpartition(":")
    words = ["baton", "doctor", "cluster", "--json", "--service-account", JOB]
    arguments = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": words}]
    patches = [{"target": {"kind": "Job"}, "patch": json.dumps(arguments)}]
    if not request.param:
        gone = {"$patch": "delete", "apiVersion": "rbac.authorization.k8s.io/v1"}
        for kind in ("ClusterRole", "ClusterRoleBinding"):
            named = {**gone, "kind": kind, "metadata": {"name": "baton-doctor"}}
            patches.append({"patch": json.dumps(named)})
    wrapper = {
        "namespace": namespace,
        "nameSuffix": JOB.removeprefix("baton-doctor"),
        "resources": [os.path.relpath(DOCTOR, tmp_path.resolve())],
        "images": [{"name": "baton-cpu", "newName": repository, "newTag": tag}],
        "patches": patches,
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(wrapper))
    try:
        told("apply", "-k", str(tmp_path))
        yield request.param
    finally:
        told("delete", "--ignore-not-found", "--wait=false", "-k", str(tmp_path))


def test_as_a_job(namespace: str, job: bool) -> None:
    def ended() -> bool:
        said = told("-n", namespace, "get", "job", JOB, "-o", "jsonpath={.status}")
        status = json.loads(said or "{}")
        return bool(status.get("succeeded") or status.get("failed"))

    eventually(ended, PATIENCE_S, "the Job to end")
    found = json.loads(told("-n", namespace, "logs", f"job/{JOB}"))
    checks = {check["name"]: check for check in found["checks"]}
    assert {name: check["status"] for name, check in checks.items()} | {
        "open files": "", "shared memory": "",
    } == {
        "api": "ok", "namespace": "ok" if job else "warn", "router access": "fail", "gpus": "ok",
        "rdma": "ok", "metrics api": "ok", "extensions": "ok", "dns": "ok", "locked memory": "ok",
        "open files": "", "shared memory": "", "rdma devices": "ok", "gpu driver": "ok",
        "pods": "ok", "workers": "ok",
    }  # fmt: skip
    assert ("not allowed" in checks["gpus"]["detail"]) != job
    assert "names have addresses" in checks["dns"]["detail"]
