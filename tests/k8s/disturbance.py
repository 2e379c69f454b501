"""Load on a release while something is done to it, and what is waited for meanwhile.

Nothing here blocks the event loop that the load runs on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from batonlm.cli.http_client import total
from tests.k8s.asks import Ask, asks
from tests.k8s.clients import STREAM_S, Clients
from tests.k8s.load import Load, references
from tests.k8s.reach import reached
from tests.k8s.release import Release

STREAMS = 4
CONNECTIONS = 12
"""Of gRPC: each chooses a router by chance, so one of two is all but sure to be chosen."""
SETTLED_STREAMS = 8
"""So many more streams show that what was done is over and done with."""
GONE_S = 180.0
POLL_S = 0.25


@dataclass
class Reference:
    """What is asked, and what a release answers in silence."""

    wanted: Sequence[Ask]
    expected: Sequence[list[int]]


async def reference_of(release: Release) -> Reference:
    wanted = asks(seed=8, count=16)
    async with reached(release) as (grpc, http), Clients(grpc, http) as clients:
        return Reference(wanted, await references(clients, wanted))


@asynccontextmanager
async def loaded(
    release: Release, reference: Reference, streams: int = STREAMS
) -> AsyncIterator[Load]:
    """So many streams at a time run while the block does, and after it to their ends."""
    async with (
        reached(release) as (grpc, http),
        Clients(grpc, http, count=CONNECTIONS) as clients,
    ):
        load = Load(clients, reference.wanted, reference.expected, streams)
        async with load.running():
            yield load


async def newcomer(release: Release, component: str, before: Sequence[str]) -> dict[str, Any]:
    """The pod of a component that was not there before."""
    pods = await asyncio.to_thread(release.pods, component)
    (new,) = [pod for pod in pods if pod["metadata"]["name"] not in before]
    return new


async def traffic_reaches(release: Release, component: str, pod: dict[str, Any]) -> None:
    """Returns when the pod has served somebody. Some pods count that at a stream's end only."""
    name = pod["metadata"]["name"]
    until = time.monotonic() + STREAM_S
    while not await asyncio.to_thread(_was_asked, release, component, name):
        assert time.monotonic() < until, f"nothing reached {name}"
        await asyncio.sleep(POLL_S)


_ASKED = {
    "router": "baton_requests_total",
    "tokenizer": "baton_encoded_tokens_total",
    "prefill": "baton_prefill_tokens_total",
    "decode": "baton_decode_tokens_total",
    "detokenizer": "baton_text_bytes_total",
}
"""What a pod of each component has counted as soon as it served anybody."""


def _was_asked(release: Release, component: str, pod: str) -> bool:
    return total(release.metrics(pod), _ASKED[component]) > 0


async def gone(release: Release, pods: Sequence[str]) -> None:
    """Returns when none of these pods is left, not even leaving."""
    names = [f"pod/{name}" for name in pods]
    await asyncio.to_thread(
        release.cluster.kubectl, "wait", "--for=delete", *names, f"--timeout={GONE_S:.0f}s",
        timeout_s=GONE_S + 10,
    )  # fmt: skip
