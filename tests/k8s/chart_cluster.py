"""Runs kubectl for tests of the chart, in namespaces of their own; renders nothing."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.relay import eventually

TIMEOUT_S = 120.0

Json = dict[str, Any]


def kubectl(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """given: its standard input. Raises nothing when kubectl fails: look at its returncode."""
    return subprocess.run(
        ["kubectl", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def told(*arguments: str, given: str = "") -> str:
    """Standard output of a kubectl that must not fail."""
    done = kubectl(*arguments, given=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def api_resources(*flags: str) -> list[str]:
    """Names of the kinds that there are; of those of others, those whose servers answer now."""
    return kubectl("api-resources", "-o", "name", *flags).stdout.split()


def as_list(objects: Iterable[Json]) -> str:
    """What kubectl reads as several objects."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


@contextmanager
def namespace(**labels: str) -> Iterator[str]:
    """A new one, with labels of pod security by their last part, removed with all in it."""
    name = f"chart-{secrets.token_hex(3)}"
    prefix = "pod-security.kubernetes.io"
    known = {f"{prefix}/{mode}": level for mode, level in labels.items()}
    metadata = {"name": name, "labels": known}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    told("create", "-f", "-", given=json.dumps(made))
    try:
        yield name
    finally:
        told("delete", "namespace", name, "--wait=false")


# Kinds of others that the chart knows: group, version, kind, plural.
FOREIGN = (
    ("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"),
    ("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
    ("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"),
    ("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"),
    ("cert-manager.io", "v1", "Certificate", "certificates"),
    ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"),
    ("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes"),
    ("gateway.networking.k8s.io", "v1", "GRPCRoute", "grpcroutes"),
    ("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools"),
)


@contextmanager
def foreign_kinds() -> Iterator[None]:
    """The kinds of operators, as far as the cluster lacks them: no more than their names."""
    missing = [
        definition
        for definition in (_definition(*each) for each in FOREIGN)
        if kubectl("get", "crd", definition["metadata"]["name"]).returncode
    ]
    names = [f"crd/{each['metadata']['name']}" for each in missing]
    try:
        if missing:
            told("create", "-f", "-", given=as_list(missing))
            told("wait", "--for=condition=Established", "--timeout=100s", *names)
            # The API server lists a kind a moment after it has made it.
            kinds = {each["metadata"]["name"] for each in missing}
            eventually(lambda: kinds <= set(api_resources()), TIMEOUT_S, "all kinds are listed")
        yield
    finally:
        if missing:
            told("delete", "--ignore-not-found", "--wait=true", *names)


def _definition(group: str, version: str, kind: str, plural: str) -> Json:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    metadata: Json = {"name": f"{plural}.{group}"}
    if group.endswith(".k8s.io"):
        # The API server asks for a word on groups that are not the cluster's own.
        metadata["annotations"] = {"api-approved.kubernetes.io": "unapproved, a test's own"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "properties": {"spec": anything}}
                    },
                }
            ],
        },
    }
