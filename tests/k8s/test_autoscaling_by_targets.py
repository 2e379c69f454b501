"""Overload of one engine pool makes an HPA grow that pool alone, by what routers ask for.

The planner serves the number, the cluster's own HPA controller follows it. With the chart's former
defaults neither pool would have grown here: what they went by stays below FORMER_TARGETS.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.k8s.charts import COMPONENTS
from tests.k8s.disturbance import Reference, loaded
from tests.k8s.reach import reached
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.slow, pytest.mark.timeout(1200)]

WITHIN_S = 300.0
POLL_S = 2.0
FORMER_SIGNALS = {"prefill": "baton_waiting_tokens", "decode": "vllm:kv_cache_usage_perc"}
FORMER_TARGETS = {"prefill": 4096.0, "decode": 0.7}
"""Of a pod: `targetWaitingTokens`, and `targetKvUse` as a share."""
RUNNING = 6
"""Sequences of a decode worker: few, so that sequences and not the CPU are what binds."""
STREAMS = 2
"""At a time while a pool shrinks: too few for a second worker to be asked for."""
QUIET_ASKS = 24
"""So many requests in a row without a refusal: those that are refused are over."""


@pytest.fixture(scope="module")
def scaled(release: Release) -> Iterator[Release]:
    image, _, tag = release.cpu_image.rpartition(":")
    before = dict(release.values)
    pools = {
        f"{pool}.autoscaling.{key}": value
        for pool in ("prefill", "decode")
        for key, value in {
            "enabled": "true",
            "minReplicas": "1",
            "maxReplicas": "2",
            "behavior.scaleDown.stabilizationWindowSeconds": "15",
        }.items()
    }
    release.upgrade(
        pools
        | {
            "planner.enabled": "true",
            "planner.image.repository": image,
            "planner.image.tag": tag,
            "decode.config.max_running": str(RUNNING),
            # Of a loaded machine with two cores, no step is fast.
            "router.config.target_between_tokens_ms": "10000",
            "router.config.target_startup_s": "10",
            "router.config.max_queue_s": "1",
        }
    )
    yield release
    # What is not given any more is as the preset has it.
    release.values = before
    release.upgrade({})


async def test_sequences_that_wait_for_decode_bring_decode(
    scaled: Release, reference: Reference
) -> None:
    """Until no more are refused; and it shrinks without a stream that fails."""
    others = await _replicas(scaled)
    async with _asking(scaled, clients=2 * RUNNING - 1, prompt=8, output=400) as asked:
        former = await _until(scaled, "decode", 2, asked)
        assert asked.refused, "there was no overload"
        assert former < FORMER_TARGETS["decode"]
        await _quiet(asked)
        assert await _replicas(scaled) == {**others, "decode": 2}
    async with loaded(scaled, reference, STREAMS) as load:
        await _until(scaled, "decode", 1, None)
        await load.more(8)
    load.tally.check(at_least=8)
    assert await _replicas(scaled) == others


async def test_prompts_that_wait_for_prefill_bring_prefill(
    scaled: Release, reference: Reference
) -> None:
    # Many sequences, so that decode has room for all that prefill hands over.
    await asyncio.to_thread(scaled.upgrade, {"decode.config.max_running": "64"})
    # While its only worker is replaced, a second one may be asked for.
    await _until(scaled, "decode", 1, None)
    others = await _replicas(scaled)
    async with _asking(scaled, clients=40, prompt=1500, output=2) as asked:
        former = await _until(scaled, "prefill", 2, asked)
        assert former < FORMER_TARGETS["prefill"]
        assert await _replicas(scaled) == {**others, "prefill": 2}
    async with loaded(scaled, reference, STREAMS) as load:
        await _until(scaled, "prefill", 1, None)
        await load.more(8)
    load.tally.check(at_least=8)
    assert await _replicas(scaled) == others


async def test_the_planner_scales_by_itself(scaled: Release, reference: Reference) -> None:
    """It says why, a new one goes on where the last one ended, and none starts beside an HPA."""
    off = {f"{pool}.autoscaling.enabled": "false" for pool in ("prefill", "decode")}
    await asyncio.to_thread(
        scaled.upgrade,
        off
        | {
            "planner.externalMetrics": "false",
            "planner.scale.decode.enabled": "true",
            "planner.scale.decode.maxReplicas": "2",
            "planner.coolDownSeconds": "10",
            "decode.config.max_running": str(RUNNING),
        },
    )
    others = await _replicas(scaled)
    async with _asking(scaled, clients=2 * RUNNING - 1, prompt=8, output=400) as asked:
        await _until(scaled, "decode", 2, asked)
        (planner,) = scaled.pod_names("planner")
        scaled.cluster.kubectl("delete", "pod", planner, "--wait=true")
        await asyncio.to_thread(scaled.rolled_out, "planner")
        await _quiet(asked)
        assert await _replicas(scaled) == {**others, "decode": 2}
    why = scaled.cluster.get("events", "--field-selector", "reason=Scaled")["items"]
    assert "from 1 to 2: routers ask for" in why[0]["message"], why
    async with loaded(scaled, reference, STREAMS) as load:
        await _until(scaled, "decode", 1, None)
        await load.more(8)
    load.tally.check(at_least=8)
    scaled.cluster.kubectl(
        "autoscale", f"deployment/{scaled.object('decode')}", "--max=2", "--cpu-percent=80"
    )
    try:
        (planner,) = scaled.pod_names("planner")
        told = scaled.cluster.kubectl(
            "exec", planner, "--", "sh", "-c", "timeout 60 baton-planner 2>&1; echo ended with $?"
        )
    finally:
        scaled.cluster.kubectl("delete", "hpa", scaled.object("decode"))
    assert "decode is scaled by the autoscaler baton-decode already" in told
    assert "ended with 3" in told


@dataclass
class Asked:
    """What became of requests so far."""

    answered: int = 0
    refused: int = 0
    in_a_row: int = 0
    """Answered since the last refusal."""
    failed: list[str] = field(default_factory=list)


@asynccontextmanager
async def _asking(
    release: Release, *, clients: int, prompt: int, output: int
) -> AsyncIterator[Asked]:
    """So many clients ask one request after another, of so many tokens, while the block runs."""
    asked, draw = Asked(), random.Random(7)

    async def work(http: str) -> None:
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=120, trust_env=False) as to:
            while True:
                ids = [draw.randrange(64, 1900) for _ in range(prompt)]
                body = {"prompt": ids, "max_tokens": output, "ignore_eos": True}
                answer = await to.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    asked.answered += 1
                    asked.in_a_row += 1
                elif answer.status_code == 429:
                    asked.refused += 1
                    asked.in_a_row = 0
                    await asyncio.sleep(draw.uniform(0.2, 0.6))
                else:
                    asked.failed.append(f"{answer.status_code}: {answer.text[:200]}")

    async with reached(release) as (_, http):
        tasks = [asyncio.create_task(work(http)) for _ in range(clients)]
        try:
            yield asked
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert not asked.failed, asked.failed[:5]


async def _quiet(asked: Asked) -> None:
    """Returns when refusals are over. Raises AssertionError after WITHIN_S."""
    until = time.monotonic() + WITHIN_S
    while asked.in_a_row < QUIET_ASKS:
        assert time.monotonic() < until, f"still refused: {asked}"
        await asyncio.sleep(POLL_S)


async def _until(release: Release, component: str, replicas: int, asked: Asked | None) -> float:
    """Returns when a pool has so many pods. Returns the most that was seen, while clients asked, of
    what its HPA would have gone by formerly."""
    until, former = time.monotonic() + WITHIN_S, 0.0
    while (found := await _replicas(release))[component] != replicas:
        if time.monotonic() > until:
            scaler = release.cluster.kubectl("describe", "hpa")
            logs = release.cluster.kubectl(
                "logs", "-l", "app.kubernetes.io/component=planner", "--tail=20"
            )
            raise AssertionError(f"{found} after {WITHIN_S:.0f} s, {asked}\n{scaler}\n{logs}")
        if asked is not None:
            seen = await asyncio.to_thread(release.metric, component, FORMER_SIGNALS[component])
            former = max(former, seen / found[component])
        await asyncio.sleep(POLL_S)
    # All of its pods are there.
    await asyncio.to_thread(release.rolled_out, component)
    return former


async def _replicas(release: Release) -> dict[str, int]:
    """What each Deployment is told to have."""
    found = await asyncio.to_thread(release.cluster.get, "deployments")
    told = {each["metadata"]["name"]: each["spec"]["replicas"] for each in found["items"]}
    return {component: told[release.object(component)] for component in COMPONENTS}
