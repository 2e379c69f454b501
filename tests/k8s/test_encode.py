"""The pool of encode workers: a model of its own, scaled like the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.k8s.cluster import Cluster
from tests.k8s.conftest import ENGINE_IMAGE
from tests.k8s.release import Release
from tests.k8s.volumes import FOLDER, claimed

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

MODEL = "tiny-vectors"
TEXTS = ["What is 3 + 4?", "The capital of France", "one two three " * 20]
WAIT_S = 120.0


@pytest.fixture
def encoding(cluster: Cluster, release: Release) -> Iterator[Release]:
    """The release with one encode worker, whose model is the one that chats, pooled by mean."""
    repository, _, tag = ENGINE_IMAGE.rpartition(":")
    before = dict(release.values)
    with claimed(cluster, "vectors") as claim:
        release.upgrade(
            {
                "encode.enabled": "true",
                "encode.model.source": "pvc",
                "encode.model.name": MODEL,
                "encode.model.pvc.claimName": claim,
                "encode.model.pvc.path": FOLDER,
                "encode.image.repository": repository,
                "encode.image.tag": tag,
            }
        )
        try:
            yield release
        finally:
            release.values = before
            release.upgrade({})


@asynccontextmanager
async def asking(release: Release) -> AsyncIterator[httpx.AsyncClient]:
    await asyncio.to_thread(found_by_routers, release, 1)
    router = release.pod_names("router")[0]
    async with (
        release.cluster.forward(f"pod/{router}", 8000) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        yield client


async def embed(client: httpx.AsyncClient) -> list[list[float]]:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": TEXTS})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def found_by_routers(release: Release, workers: int) -> None:
    """Returns when each router has found so many encode workers."""
    deadline = time.monotonic() + WAIT_S
    labels = ('role="encode"', 'state="serving"')
    while release.metric("router", "baton_workers", *labels) != workers * len(
        release.pod_names("router")
    ):
        assert time.monotonic() < deadline, "the routers do not find the workers"
        time.sleep(1)


async def test_a_pool_of_encode_workers(encoding: Release) -> None:
    """It answers beside the chat, is scaled by kubectl, and survives a pod."""
    async with asking(encoding) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert {each["id"]: each["task"] for each in models} == {
            "baton-tiny": "generate",
            MODEL: "embed",
        }
        vectors = await embed(client)
        assert len(vectors) == len(TEXTS) and vectors[0] != vectors[1]

        await asyncio.to_thread(encoding.scale, "encode", 2)
        await asyncio.to_thread(found_by_routers, encoding, 2)
        gone, _ = encoding.pod_names("encode")
        delete = asyncio.to_thread(encoding.cluster.kubectl, "delete", "pod", gone, "--wait=true")
        ended = asyncio.create_task(delete)
        while not ended.done():
            again = await embed(client)
            for before, after in zip(vectors, again, strict=True):
                assert after == pytest.approx(before, abs=1e-5)
        await ended
        await asyncio.to_thread(encoding.rolled_out, "encode")

        ranked = await client.post(
            "/v1/rerank", json={"model": MODEL, "query": TEXTS[0], "documents": TEXTS[:2]}
        )
        assert ranked.json()["results"][0]["index"] == 0, ranked.text
        chat = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=chat)
        assert "7" in answer.json()["choices"][0]["message"]["content"]
