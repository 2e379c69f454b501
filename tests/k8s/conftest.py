"""The cluster of KUBECONFIG, a namespace of the session, and one Baton in it by the CPU preset.

BATON_IMAGE_CPU and BATON_IMAGE_ENGINE name the images; names of `localhost` have to be on the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Iterator

import pytest

from tests.k8s.charts import CHART
from tests.k8s.cluster import Cluster
from tests.k8s.disturbance import Reference, reference_of
from tests.k8s.release import DISK_MIB, Release

CPU_IMAGE = os.environ.get("BATON_IMAGE_CPU", "localhost/baton-cpu:dev")
ENGINE_IMAGE = os.environ.get("BATON_IMAGE_ENGINE", "localhost/baton-engine-cpu:dev")
NAMESPACE_GONE_S = 300.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A namespace that admits restricted pods only, deleted with all that is in it."""
    for tool in ("kubectl", "helm"):
        assert shutil.which(tool), f"these tests need {tool}"
    assert os.environ.get("KUBECONFIG"), "KUBECONFIG names no cluster"
    found = Cluster(f"baton-test-{secrets.token_hex(4)}")
    assert CHART.is_dir(), f"there is no {CHART}"
    _expect_images(found)
    manifest = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": found.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    }
    found.run("kubectl", "create", "-f", "-", text=json.dumps(manifest))
    try:
        yield found
    finally:
        found.run(
            "kubectl", "delete", "namespace", found.namespace,
            timeout_s=NAMESPACE_GONE_S,
        )  # fmt: skip


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Iterator[Release]:
    """By the preset most prompts take a hand-over; here KV moves over NIXL or not at all."""
    installed = Release(
        cluster,
        CPU_IMAGE,
        ENGINE_IMAGE,
        values={
            "prefill.config.transport": "nixl",
            "decode.config.transport": "nixl",
            "decode.resources.limits.ephemeral-storage": f"{DISK_MIB}Mi",
        },
    )
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture(scope="session")
def reference(release: Release) -> Reference:
    """What is asked under load, and the answers of silence."""
    return asyncio.run(reference_of(release))


def _expect_images(cluster: Cluster) -> None:
    """What no registry has must be there already; others are the kubelet's business."""
    nodes = json.loads(cluster.run("kubectl", "get", "nodes", "-o", "json"))["items"]
    there = {
        name
        for node in nodes
        for image in node["status"]["images"]
        for name in image["names"] or ()
    }
    for image in (CPU_IMAGE, ENGINE_IMAGE):
        if image.startswith("localhost/"):
            assert image in there, (
                f"no node has {image}: build it and load it, see deploy/Dockerfile"
            )
