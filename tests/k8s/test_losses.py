"""Pods that are taken away, evicted, replaced, or killed for their memory while clients ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.k8s.charts import COMPONENTS
from tests.k8s.disturbance import SETTLED_STREAMS, STREAMS, Reference, loaded
from tests.k8s.release import Release

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

ENDED = STREAMS + SETTLED_STREAMS
"""As many streams end under a load at least."""


@pytest.fixture(scope="module", autouse=True)
def pairs(release: Release) -> Iterator[None]:
    """Two pods of each kind, as whoever cares for losses has."""
    for component in COMPONENTS:
        release.scale(component, 2)
    yield
    for component in COMPONENTS:
        release.scale(component, 1)


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_pod_is_deleted_by_force(
    release: Release, reference: Reference, component: str
) -> None:
    """A router's own streams end with it, and their clients may ask again; also those that the
    node still leads to it once it is gone."""
    async with loaded(release, reference) as load:
        victim = release.pod_names(component)[0]
        await asyncio.to_thread(
            release.cluster.kubectl, "delete", "pod", victim, "--force", "--grace-period=0"
        )
        await asyncio.to_thread(release.rolled_out, component)
        enough = load.tally.answered + SETTLED_STREAMS
        while load.tally.answered < enough:
            await load.more(1)
    if component == "router":
        assert load.tally.begun <= STREAMS, load.tally.failed
        load.tally.check(may_fail=len(load.tally.failed))
    else:
        load.tally.check(at_least=ENDED)


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_rollout_replaces_every_pod(
    release: Release, reference: Reference, component: str
) -> None:
    async with loaded(release, reference) as load:
        await asyncio.to_thread(release.restart, component)
        await load.more(SETTLED_STREAMS)
    load.tally.check(at_least=ENDED)


async def test_helm_upgrade_changes_a_value_of_all(release: Release, reference: Reference) -> None:
    """All ten pods start anew, which may leave a small node's kubelet too little CPU to say in time
    that it is there. Kubernetes then takes every pod out of its Service, and who asks finds nobody.
    Streams that had begun do not break, even so; and where that was to be seen it is done again.
    """
    for level in ("debug", "info"):
        before = await asyncio.to_thread(release.cluster.nodes_ready_since)
        async with loaded(release, reference) as load:
            await asyncio.to_thread(release.upgrade, {"config.log_level": level})
            await load.more(SETTLED_STREAMS)
        was_ready = await asyncio.to_thread(release.cluster.nodes_ready_since) == before
        assert not load.tally.begun, load.tally.failed
        if was_ready or not load.tally.failed:
            break
    may_fail = 0 if was_ready else len(load.tally.failed)
    load.tally.check(may_fail=may_fail)


@pytest.mark.parametrize("component", ["decode", "tokenizer"])
async def test_a_container_is_killed_for_its_memory(
    release: Release, reference: Reference, component: str
) -> None:
    async with loaded(release, reference) as load:
        victim = release.pod_names(component)[0]
        await asyncio.to_thread(release.take_all_memory, victim)
        await load.more(SETTLED_STREAMS)
        assert release.last_end(victim) == "OOMKilled"
    load.tally.check(at_least=ENDED)


async def test_the_kubelet_evicts_a_pod_that_fills_its_node(
    release: Release, reference: Reference
) -> None:
    """For more of the node's disk than it may have, at once and without asking."""
    async with loaded(release, reference) as load:
        victim = release.pod_names("decode")[0]
        await asyncio.to_thread(release.fill_disk, victim)
        await asyncio.to_thread(release.rolled_out, "decode")
        await load.more(SETTLED_STREAMS)
    release.cluster.kubectl("delete", "pod", victim)
    load.tally.check(at_least=ENDED)
