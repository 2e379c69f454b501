"""`baton doctor cluster` on a real cluster: from outside with a kubeconfig, and as a Job inside."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.k8s.release import Release

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


def deployment(namespace: str, **spec: Any) -> None:
    """Of one decode pod, which has to be there for nobody."""
    one = pod("any", "decode", CPU_IMAGE, "true", **spec)
    labels = one["metadata"]["labels"]
    template = {"metadata": {"labels": labels}, "spec": one["spec"]}
    apply(
        namespace,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "refused-decode", "labels": labels},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    )


@pytest.mark.parametrize("by", ["quota", "PodSecurity"])
def test_pods_that_are_refused_are_not_none_installed(
    namespace: str, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    if by == "quota":
        told("-n", namespace, "create", "quota", "none", "--hard=pods=0")
        deployment(namespace)
    else:
        deployment(namespace, hostNetwork=True)

    def explained() -> bool:
        code, found = asked(capsys, namespace)
        return code == 1 and by in found["pools"]["detail"] and found["pods"]["status"] == "fail"

    eventually(explained, PATIENCE_S, f"a refusal by {by} to be seen")


JOB = "baton-doctor-tried"


@contextmanager
def doctor_job(namespace: str, folder: Path, *, sees_nodes: bool) -> Iterator[Checks]:
    """What deploy/k8s/doctor makes, in a namespace of another name, and what it found."""
    repository, _, tag = CPU_IMAGE.rpartition(":")
    words = ["baton", "doctor", "cluster", "--json", "--service-account", JOB]
    arguments = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": words}]
    patches = [{"target": {"kind": "Job"}, "patch": json.dumps(arguments)}]
    if not sees_nodes:
        gone = {"$patch": "delete", "apiVersion": "rbac.authorization.k8s.io/v1"}
        for kind in ("ClusterRole", "ClusterRoleBinding"):
            named = {**gone, "kind": kind, "metadata": {"name": "baton-doctor"}}
            patches.append({"patch": json.dumps(named)})
    wrapper = {
        "namespace": namespace,
        "nameSuffix": JOB.removeprefix("baton-doctor"),
        "resources": [os.path.relpath(DOCTOR, folder.resolve())],
        "images": [{"name": "baton-cpu", "newName": repository, "newTag": tag}],
        "patches": patches,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(wrapper))

    def ended() -> bool:
        said = told("-n", namespace, "get", "job", JOB, "-o", "jsonpath={.status}")
        status = json.loads(said or "{}")
        return bool(status.get("succeeded") or status.get("failed"))

    try:
        told("apply", "-k", str(folder))
        eventually(ended, PATIENCE_S, "the Job to end")
        found = json.loads(told("-n", namespace, "logs", f"job/{JOB}"))
        yield {check["name"]: check for check in found["checks"]}
    finally:
        told("delete", "--ignore-not-found", "--wait=false", "-k", str(folder))


_CONNECT = """
import socket
try:
    socket.create_connection(("{0}", 50052), timeout=5).close()
    print("open")
except OSError:
    print("shut")
"""


def test_policies_are_believed_where_the_network_enforces_them(
    release: Release, tmp_path: Path
) -> None:
    """What a tokenizer, which no policy lets in there either, sees of decode's health port."""
    (decode,) = release.pods("decode")
    seen = release.cluster.execute(
        release.pod_names("tokenizer")[0],
        *("python", "-c", _CONNECT.format(decode["status"]["podIP"])),
    ).strip()
    with doctor_job(release.cluster.namespace, tmp_path, sees_nodes=False) as checks:
        found = checks["network policy"]
        assert found["status"] == {"open": "fail", "shut": "ok"}[seen], found
        if seen == "open":
            assert decode["metadata"]["name"] in found["detail"]
            assert "does not enforce" in found["detail"]
        assert checks["pools"]["status"] == checks["pods"]["status"] == "ok"


@pytest.mark.parametrize("sees_nodes", [False, True])
def test_as_a_job(namespace: str, tmp_path: Path, sees_nodes: bool) -> None:
    with doctor_job(namespace, tmp_path, sees_nodes=sees_nodes) as checks:
        _as_in_an_empty_namespace(checks, sees_nodes)


def _as_in_an_empty_namespace(checks: Checks, sees_nodes: bool) -> None:
    assert {name: check["status"] for name, check in checks.items()} | {
        "open files": "", "shared memory": "",
    } == {
        "api": "ok", "namespace": "ok" if sees_nodes else "warn", "router access": "fail",
        "gpus": "ok", "rdma": "ok", "metrics api": "ok", "extensions": "ok", "dns": "ok",
        "locked memory": "ok",
        "open files": "", "shared memory": "", "rdma devices": "ok", "gpu driver": "ok",
        "pools": "ok", "pods": "ok", "network policy": "ok", "workers": "ok",
    }  # fmt: skip
    assert ("not allowed" in checks["gpus"]["detail"]) != sees_nodes
    assert "names have addresses" in checks["dns"]["detail"]
