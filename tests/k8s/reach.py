"""How this machine reaches a router's Service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.k8s.release import Release

CONNECT_S = 3.0
ROUTED_S = 60.0
POLL_S = 0.2

_routed: set[str] = set()
"""Addresses that have answered: routes lead to Services here."""


@asynccontextmanager
async def reached(release: Release) -> AsyncIterator[tuple[str, str]]:
    """host:port of gRPC and of HTTP. Straight to the Service where a route leads to it; else
    through port-forward, which stays with one pod and ends with it.
    """
    grpc, http = (release.service_address(port) for port in ("grpc", "http"))
    if await _answers(grpc):
        yield grpc, http
        return
    router = f"service/{release.object('router')}"
    async with (
        release.cluster.forward(router, 50051) as grpc_port,
        release.cluster.forward(router, 8000) as http_port,
    ):
        yield f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}"


async def _answers(address: str) -> bool:
    """Whether a route leads there. Where one is known, one that is slow to answer has longer."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ROUTED_S if _routed else CONNECT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                    break
                except ConnectionRefusedError:
                    # By the node, as long as it has no router for the Service.
                    await asyncio.sleep(POLL_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    await writer.wait_closed()
    _routed.add(address)
    return True
