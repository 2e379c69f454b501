"""A scripted Frontend behind a real socket, and the clients that talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter

from batonlm.router.api.http.server import HttpServer, serve_http
from tests.services.router_http.scripted import ANYONE, NO_TLS, Scripted, http_app, openai_client


@pytest.fixture
def frontend() -> Scripted:
    return Scripted()


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("baton_tests", "Only here", registry=registry).inc(3)
    return registry


@pytest.fixture
async def server(frontend: Scripted, registry: CollectorRegistry) -> AsyncIterator[HttpServer]:
    server = await serve_http(http_app(frontend, registry, ANYONE), "127.0.0.1:0")
    try:
        yield server
        assert frontend.open_streams == 0
    finally:
        await server.close()


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://{server.address}"
    async with httpx.AsyncClient(
        base_url=base, timeout=120, trust_env=False, verify=NO_TLS
    ) as client:
        yield client


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(server.address) as client:
        yield client
