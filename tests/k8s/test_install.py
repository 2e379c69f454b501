"""From nothing to an answer: helm installs Baton, and clients reach it from inside and outside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from batonlm.client import AsyncClient
from tests.k8s.asks import asks
from tests.k8s.charts import COMPONENTS, ENGINES
from tests.k8s.clients import Clients
from tests.k8s.load import Load, references
from tests.k8s.reach import reached
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

QUESTION = "What is 3 + 4?"
MODEL = "baton-tiny"


@pytest.fixture
async def clients(release: Release) -> AsyncIterator[Clients]:
    async with reached(release) as (grpc, http), Clients(grpc, http) as made:
        yield made


def test_every_pod_is_ready_and_never_restarted(release: Release) -> None:
    for component in COMPONENTS:
        pods = release.pods(component)
        assert pods, component
        release.check_never_restarted(component)
        for pod in pods:
            for status in pod["status"]["containerStatuses"]:
                assert status["ready"], pod["metadata"]["name"]


def test_every_pod_runs_with_no_more_than_it_needs(release: Release) -> None:
    for component in COMPONENTS:
        for pod in release.pods(component):
            assert pod["spec"]["securityContext"]["runAsNonRoot"]
            for container in pod["spec"]["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"]
                assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_helm_test_is_green(release: Release) -> None:
    release.test()


def test_a_pod_chats_through_the_service(release: Release) -> None:
    pod = release.pod_names("tokenizer")[0]
    service = f"{release.object('router')}.{release.cluster.namespace}.svc:50051"
    said = release.cluster.execute(pod, "baton", "chat", "--grpc", service, QUESTION)
    assert "7" in said


async def test_a_chat_from_outside_over_grpc(release: Release) -> None:
    async with (
        release.cluster.forward(f"service/{release.object('router')}", 50051) as port,
        AsyncClient(f"127.0.0.1:{port}") as client,
    ):
        assert [model.name for model in await client.models(timeout_s=120)] == [MODEL]
        answer = await client.chat(QUESTION, max_tokens=32, temperature=0.0, timeout_s=120).read()
    assert "7" in answer.text


async def test_kv_moves_over_nixl_between_two_pods(release: Release, clients: Clients) -> None:
    wanted = asks(seed=1, count=4)
    before = _moved(release)
    await references(clients, wanted)
    after = _moved(release)
    addresses = {pod["status"]["podIP"] for c in ENGINES for pod in release.pods(c)}
    assert len(addresses) >= 2
    assert after["prefill"] > before["prefill"], (before, after)
    assert after["decode"] - before["decode"] == after["prefill"] - before["prefill"] > 0
    assert release.metric("decode", "baton_transfer_errors_total") == 0


async def test_answers_under_load_are_those_of_silence(clients: Clients) -> None:
    wanted = asks(seed=2, count=8)
    load = Load(clients, wanted, await references(clients, wanted), streams=4)
    async with load.running() as tally:
        await load.more(8, within_s=120)
    tally.check(at_least=8)


def test_configuration_says_nixl(release: Release) -> None:
    """What the metric counts are bytes of whichever transport there is: here there is one."""
    for component in ENGINES:
        for pod in release.pods(component):
            environment = {
                one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]
            }
            assert environment["BATON_TRANSPORT"] == "nixl", json.dumps(environment)


def _moved(release: Release) -> dict[str, float]:
    return {side: release.metric(side, "baton_handover_bytes_total") for side in ENGINES}
