"""Two releases in one namespace: the second one as another cluster would have it.

Its model is on a volume that it claims, and its pods run as a user that the image does not know, as
OpenShift assigns them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from batonlm.client import AsyncClient
from tests.k8s.chart_cluster import namespace, told
from tests.k8s.charts import COMPONENTS
from tests.k8s.cluster import Cluster
from tests.k8s.conftest import CPU_IMAGE, ENGINE_IMAGE
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

QUESTION = "What is 3 + 4?"
FIRST, SECOND = "baton-tiny", "other-model"
USER = 1000690000
DONE_S = 120


@pytest.fixture
def claim(cluster: Cluster) -> Iterator[str]:
    """A claim of a volume with the bundled model in its folder `tiny`: a folder of the node."""
    name = f"{cluster.namespace}-models"
    folder = f"/var/tmp/{name}"
    size = {"storage": "1Gi"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {"capacity": size, "hostPath": {"path": folder}, **shared},
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {"resources": {"requests": size}, "volumeName": name, **shared},
    }
    with namespace() as elsewhere:
        on_the_node(elsewhere, folder, "fill", "cp -rL /opt/baton/models/baton-tiny /folder/tiny")
        cluster.kubectl("create", "-f", "-", text=json.dumps(volume))
        try:
            cluster.kubectl("create", "-f", "-", text=json.dumps(wanted))
            yield "models"
            cluster.kubectl("delete", "pvc", "models")
        finally:
            cluster.kubectl("delete", "pv", name)
            on_the_node(elsewhere, folder, "clear", "rm -r /folder/tiny")


def on_the_node(where: str, folder: str, name: str, command: str) -> None:
    """Runs a command in a pod that may write a folder of the node, at /folder."""
    spec = {
        "restartPolicy": "Never",
        "volumes": [{"name": "f", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}],
        "containers": [
            {
                "name": name,
                "image": CPU_IMAGE,
                "command": ["sh", "-c", command],
                "securityContext": {"runAsUser": 0},
                "volumeMounts": [{"name": "f", "mountPath": "/folder"}],
            }
        ],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    told("-n", where, "create", "-f", "-", given=json.dumps(pod))
    done = "--for=jsonpath={.status.phase}=Succeeded"
    told("-n", where, "wait", f"pod/{name}", done, f"--timeout={DONE_S}s")


async def test_two_releases_know_nothing_of_each_other(release: Release, claim: str) -> None:
    values = {
        "fixedUser": "false",
        "model.source": "pvc",
        "model.name": SECOND,
        "model.pvc.claimName": claim,
        "model.pvc.path": "tiny",
    }
    for component in COMPONENTS:
        values[f"{component}.podSecurityContext.runAsUser"] = str(USER)
    other = Release(release.cluster, CPU_IMAGE, ENGINE_IMAGE, name="baton-other", values=values)
    await asyncio.to_thread(other.install)
    try:
        for one, model in ((release, FIRST), (other, SECOND)):
            await answers(one, model)
            for role in COMPONENTS[1:]:
                pods = len(one.pods(role))
                labels = (f'role="{role}"', 'state="serving"')
                assert one.metric("router", "baton_workers", *labels) == pods
            await asyncio.to_thread(one.test)
        for component in COMPONENTS:
            (pod,) = other.pod_names(component)
            user = other.cluster.execute(pod, "python", "-c", "import os; print(os.getuid())")
            assert int(user) == USER
    finally:
        await asyncio.to_thread(other.uninstall)
    await answers(release, FIRST)


async def answers(release: Release, model: str) -> None:
    """Asks for the one model that a release has."""
    async with (
        release.cluster.forward(f"service/{release.object('router')}", 50051) as port,
        AsyncClient(f"127.0.0.1:{port}") as client,
    ):
        assert [each.name for each in await client.models(timeout_s=60)] == [model]
        answer = await client.chat(QUESTION, max_tokens=32, temperature=0.0, timeout_s=60).read()
    assert "7" in answer.text
