"""A HorizontalPodAutoscaler gives a pool pods while it has too much to do, and no other pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.k8s.charts import COMPONENTS
from tests.k8s.reach import reached
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

LONG_TEXT = "nobody drops the baton on the way " * 6000
"""About 200 KB: next to no work for anybody but a tokenizer."""
CLIENTS = 4
WITHIN_S = 240.0
POLL_S = 2.0


@pytest.fixture
def scaled_by_cpu(release: Release) -> Iterator[None]:
    release.upgrade(
        {
            "tokenizer.autoscaling.enabled": "true",
            "tokenizer.autoscaling.minReplicas": "1",
            "tokenizer.autoscaling.maxReplicas": "2",
            "tokenizer.autoscaling.targetCPU": "80",
            "tokenizer.autoscaling.behavior.scaleDown.stabilizationWindowSeconds": "15",
        }
    )
    yield
    release.upgrade({"tokenizer.autoscaling.enabled": "false"})


async def test_work_for_the_tokenizer_scales_it_alone(
    release: Release, scaled_by_cpu: None
) -> None:
    async with reached(release) as (_, http):
        others = await _replicas(release)
        work = [asyncio.create_task(_tokenize(http)) for _ in range(CLIENTS)]
        try:
            await _until(release, 2, work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        assert await _replicas(release) == {**others, "tokenizer": 2}
        await _until(release, 1, [])
    assert await _replicas(release) == {**others, "tokenizer": 1}


async def _tokenize(http: str) -> None:
    """Keeps a tokenizer busy until it is cancelled."""
    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=120, trust_env=False) as client:
        number = 0
        while True:
            number += 1
            # No two begin alike, so that none is remembered.
            answer = await client.post("/tokenize", json={"prompt": f"{number} {LONG_TEXT}"})
            assert answer.status_code == 200, answer.text[:500]


async def _until(release: Release, tokenizers: int, work: list[asyncio.Task[None]]) -> None:
    until = time.monotonic() + WITHIN_S
    while (found := await _replicas(release))["tokenizer"] != tokenizers:
        for task in work:
            if task.done():
                task.result()
        if time.monotonic() > until:
            scaler = release.cluster.kubectl("describe", "hpa")
            raise AssertionError(f"{found} after {WITHIN_S:.0f} s\n{scaler}")
        await asyncio.sleep(POLL_S)


async def _replicas(release: Release) -> dict[str, int]:
    """What each Deployment is told to have."""
    found = await asyncio.to_thread(release.cluster.get, "deployments")
    told = {each["metadata"]["name"]: each["spec"]["replicas"] for each in found["items"]}
    return {component: told[release.object(component)] for component in COMPONENTS}
