"""Two releases in one namespace, the second one as another cluster would have it, with two models.

Its own model is on a volume that it claims, its pods run as a user that the image does not know, as
OpenShift assigns them, and its planner takes its other model to nothing and back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from batonlm.client import AsyncClient
from tests.e2e.relay import eventually
from tests.k8s.charts import COMPONENTS
from tests.k8s.cluster import Cluster
from tests.k8s.conftest import CPU_IMAGE, ENGINE_IMAGE
from tests.k8s.release import Release
from tests.k8s.volumes import FOLDER, claimed

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

QUESTION = "What is 3 + 4?"
FIRST, SECOND, THIRD = "baton-tiny", "other-model", "third-model"
USER = 1000690000
SMALL = "small-decode"
"""The one pool of the third model: it shares tokenizers, and decode computes its prompts."""
WITHIN_S = 180.0
POLL_S = 1.0


@pytest.fixture(scope="module")
def other(cluster: Cluster) -> Iterator[Release]:
    image, _, tag = CPU_IMAGE.rpartition(":")
    with claimed(cluster, "models") as claim:
        values = {
            "fixedUser": "false",
            "model.source": "pvc",
            "model.name": SECOND,
            "model.pvc.claimName": claim,
            "model.pvc.path": FOLDER,
            "models.small.model.source": "bundled",
            "models.small.model.name": THIRD,
            "models.small.sharesTokenizer": "true",
            "models.small.prefill.replicaCount": "0",
            "models.small.planner.scale.decode.enabled": "true",
            "models.small.planner.scale.decode.minReplicas": "0",
            "planner.enabled": "true",
            "planner.externalMetrics": "false",
            "planner.coolDownSeconds": "5",
            "planner.image.repository": image,
            "planner.image.tag": tag,
            "router.config.idle_timeout_s": "20",
            "router.config.wait_timeout_s": f"{WITHIN_S:.0f}",
        }
        for component in COMPONENTS:
            values[f"{component}.podSecurityContext.runAsUser"] = str(USER)
        made = Release(cluster, CPU_IMAGE, ENGINE_IMAGE, name="baton-other", values=values)
        made.install()
        try:
            yield made
        finally:
            made.uninstall()


async def test_two_releases_know_nothing_of_each_other(release: Release, other: Release) -> None:
    for one, models in ((release, [FIRST]), (other, [SECOND, THIRD])):
        async with client(one) as asking:
            known = {each.name for each in await asking.models(timeout_s=120)}
            # One without workers is not listed.
            assert {models[0]} <= known <= set(models)
            assert "7" in await answer(asking, "")
        for role in ("tokenizer", "prefill", "detokenizer"):
            knows_its_own(one, role)
        await asyncio.to_thread(one.test)
    for component in COMPONENTS:
        (pod,) = other.pod_names(component)
        user = other.cluster.execute(pod, "python", "-c", "import os; print(os.getuid())")
        assert int(user) == USER


async def test_each_model_answers_by_its_name_from_its_own_pods(other: Release) -> None:
    async with client(other) as asking:
        for name, pool, idle in ((SECOND, "decode", SMALL), (THIRD, SMALL, "decode")):
            # The first answer of one that is away brings its pod.
            said = await answer(asking, name)
            before = {each: decoded(other, each) for each in (pool, idle)}
            assert await answer(asking, name) == said
            assert decoded(other, pool) > before[pool]
            # Its pod may leave meanwhile.
            assert decoded(other, idle) <= before[idle]


async def test_a_model_goes_to_nothing_and_its_first_requests_wait_for_it(other: Release) -> None:
    async with client(other) as asking:
        await until_nothing_is_left(other)
        assert other.pods("decode"), "the release's own model stays"
        started = asyncio.create_task(ready(other))
        answers = asyncio.gather(*(answer(asking, THIRD) for _ in range(3)))
        assert "7" in await answer(asking, SECOND), "another model does not wait"
        assert len(set(await answers)) == 1
        await started


@asynccontextmanager
async def client(release: Release) -> AsyncIterator[AsyncClient]:
    service = f"service/{release.object('router')}"
    async with (
        release.cluster.forward(service, 50051) as port,
        AsyncClient(f"127.0.0.1:{port}") as made,
    ):
        yield made


async def answer(asking: AsyncClient, model: str) -> str:
    """model: "" for the one of requests that name none."""
    chat = asking.chat(QUESTION, model=model, max_tokens=32, temperature=0.0, timeout_s=WITHIN_S)
    return (await chat.read()).text


def knows_its_own(release: Release, role: str) -> None:
    """Returns when routers serve by as many workers of a role as the release has pods of it."""
    labels = (f'role="{role}"', 'state="serving"')

    def holds() -> bool:
        return release.metric("router", "baton_workers", *labels) == len(release.pods(role))

    eventually(holds, WITHIN_S, f"{release.name} knows its own workers of the role {role}")


def decoded(release: Release, pool: str) -> float:
    return release.metric(pool, "baton_decode_tokens_total")


async def until_nothing_is_left(release: Release) -> None:
    """Returns when the planner has taken the third model's last pod away."""
    until = time.monotonic() + WITHIN_S
    while names := await asyncio.to_thread(release.pod_names, SMALL):
        assert time.monotonic() < until, f"{names} are still there"
        await asyncio.sleep(POLL_S)
    # The event is made after the change that it tells of.
    why = "from 1 to 0: routers ask for 0"
    while why not in (told := await asyncio.to_thread(scalings, release)):
        assert time.monotonic() < until, told
        await asyncio.sleep(POLL_S)


def scalings(release: Release) -> str:
    """What the planner's events say."""
    events = release.cluster.get("events", "--field-selector", "reason=Scaled")["items"]
    return "\n".join(each["message"] for each in events)


async def ready(release: Release) -> None:
    """Returns when the planner has brought it back."""
    until = time.monotonic() + WITHIN_S
    while not await asyncio.to_thread(release.pods, SMALL):
        assert time.monotonic() < until, "nothing brings the pool back"
        await asyncio.sleep(POLL_S)
    await asyncio.to_thread(release.rolled_out, SMALL)
