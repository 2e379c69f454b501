"""What the base of deploy/k8s is made by; renders nothing, needs neither helm nor kubectl."""

from __future__ import annotations

from pathlib import Path

import yaml

import gen_manifests as generator

SERVICE = """
kind: Service
metadata:
  name: baton-decode
  namespace: any
  labels:
    app.kubernetes.io/component: decode
    app.kubernetes.io/managed-by: Helm
    helm.sh/chart: baton-1
"""
HOOK = """
kind: Pod
metadata:
  name: baton-test
  labels: {app.kubernetes.io/component: test}
  annotations: {helm.sh/hook: test}
"""
ROUTER = """
kind: Deployment
metadata:
  name: baton-router
  labels: {app.kubernetes.io/component: router}
spec:
  template:
    spec:
      containers:
        - env:
            - {name: BATON_DECODES, value: "k8s:///baton-decode.any:grpc"}
            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
"""


def test_helms_own_and_the_namespace_are_left_out() -> None:
    files = generator.make("---".join(("", SERVICE, HOOK, ROUTER)))
    assert set(files) == {"decode.yaml", "router.yaml", "kustomization.yaml"}
    service = yaml.safe_load(files["decode.yaml"])
    assert service["metadata"] == {
        "name": "baton-decode",
        "labels": {"app.kubernetes.io/component": "decode"},
    }
    (container,) = yaml.safe_load(files["router.yaml"])["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["value"] == "k8s:///baton-decode:grpc"


def test_what_differs_is_named(tmp_path: Path) -> None:
    for name in ("same.yaml", "changed.yaml", "nobodys.yaml", "values.yaml"):
        (tmp_path / name).write_text("text")
    made = {"same.yaml": "text", "changed.yaml": "other", "missing.yaml": "text"}
    expected = ["changed.yaml", "missing.yaml", "nobodys.yaml"]
    assert generator.differing(made, tmp_path) == expected


def test_every_file_of_the_base_says_what_made_it() -> None:
    made = set(generator.BASE.glob("*.yaml")) - {generator.BASE / "values.yaml"}
    assert all(path.read_text().startswith(generator.HEAD) for path in made)
    listed = yaml.safe_load((generator.BASE / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in made} == {*listed, "kustomization.yaml"}
