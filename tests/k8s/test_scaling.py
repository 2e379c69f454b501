"""`kubectl scale` of each pool while clients ask: nobody notices, and newcomers get work."""

from __future__ import annotations

import asyncio

import pytest

from tests.k8s.charts import COMPONENTS
from tests.k8s.disturbance import (
    SETTLED_STREAMS,
    STREAMS,
    Reference,
    gone,
    loaded,
    newcomer,
    traffic_reaches,
)
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_pool_grows_and_shrinks(
    release: Release, reference: Reference, component: str
) -> None:
    """The pod that leaves is the older one, so its successor has everything to take over."""
    old = release.pod_names(component)
    async with loaded(release, reference) as load:
        await asyncio.to_thread(release.scale, component, len(old) + 1)
        new = await newcomer(release, component, old)
        await traffic_reaches(release, component, new)
        await load.more(SETTLED_STREAMS)
        await asyncio.to_thread(release.prefer_leaving, old)
        await asyncio.to_thread(release.scale, component, len(old))
        await gone(release, old[:1])
        await load.more(SETTLED_STREAMS)
    load.tally.check(at_least=STREAMS + 2 * SETTLED_STREAMS)


async def test_without_prefill_decode_does_it_all(release: Release, reference: Reference) -> None:
    old = release.pod_names("prefill")
    async with loaded(release, reference) as load:
        await asyncio.to_thread(release.scale, "prefill", 0)
        await gone(release, old)
        await load.more(SETTLED_STREAMS)
        await asyncio.to_thread(release.scale, "prefill", len(old))
        for pod in await asyncio.to_thread(release.pods, "prefill"):
            await traffic_reaches(release, "prefill", pod)
        await load.more(SETTLED_STREAMS)
    load.tally.check(at_least=STREAMS + 2 * SETTLED_STREAMS)
