"""Two releases in one namespace: the second one as another cluster would have it.

Its model is on a volume that it claims, and its pods run as a user that the image does not know, as
OpenShift assigns them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from batonlm.client import AsyncClient
from tests.k8s.charts import COMPONENTS
from tests.k8s.cluster import Cluster
from tests.k8s.conftest import CPU_IMAGE, ENGINE_IMAGE
from tests.k8s.release import Release
from tests.k8s.volumes import FOLDER, claimed

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

QUESTION = "What is 3 + 4?"
FIRST, SECOND = "baton-tiny", "other-model"
USER = 1000690000


@pytest.fixture
def claim(cluster: Cluster) -> Iterator[str]:
    with claimed(cluster, "models") as name:
        yield name


async def test_two_releases_know_nothing_of_each_other(release: Release, claim: str) -> None:
    values = {
        "fixedUser": "false",
        "model.source": "pvc",
        "model.name": SECOND,
        "model.pvc.claimName": claim,
        "model.pvc.path": FOLDER,
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
