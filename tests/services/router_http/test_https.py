"""The HTTP face over TLS."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.rpc import tls
from batonlm.rpc.tls import Certificates
from tests.rpc.authority import Authority, Files
from tests.services.router_http.scripted import ANYONE, Scripted, http_app
from tests.services.router_http.test_server import CHAT, HELLO


@asynccontextmanager
async def serving(
    certificates: Certificates, frontend: Scripted | None = None
) -> AsyncIterator[HttpServer]:
    app = http_app(frontend or Scripted(), CollectorRegistry(), ANYONE)
    server = await serve_http(app, "127.0.0.1:0", certificates=certificates)
    try:
        yield server
    finally:
        await server.close()


def client(address: str, context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"https://{address}", verify=context, timeout=120, trust_env=False
    )


def trusting(files: Files, *, show: Files | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca))
    if show is not None:
        context.load_cert_chain(show.cert, show.key)
    return context


@pytest.mark.deep
async def test_it_answers_over_tls_only_and_follows_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    authority = Authority(tmp_path)
    files = authority.host("public", "127.0.0.1")
    frontend = Scripted(hold=True)
    async with serving(Certificates(str(files.cert), str(files.key)), frontend) as server:
        async with client(server.address, trusting(files)) as earlier:
            assert (await earlier.get("/health")).status_code == 200
            asked = earlier.post(CHAT, json={**HELLO, "stream": True})
            running = asyncio.ensure_future(asked)
            await asyncio.wait_for(frontend.started.wait(), 120)
            renewed = Authority(tmp_path).host("public", "127.0.0.1")
            # Another CA altogether: only a new certificate satisfies it, only the old one the old.
            async with client(server.address, trusting(renewed)) as later:
                async with asyncio.timeout(120):
                    while not await answers(later):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            frontend.release.set()
            assert (await running).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=120, trust_env=False) as plain:
                await plain.get(f"http://{server.address}/health")


async def answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.ConnectError:
        return False


async def test_old_tls_is_refused(tmp_path: Path) -> None:
    files = Authority(tmp_path).host("public", "127.0.0.1")
    async with serving(Certificates(str(files.cert), str(files.key))) as server:
        context = trusting(files)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        async with client(server.address, context) as old:
            with pytest.raises(httpx.ConnectError):
                await old.get("/health")


async def test_clients_need_a_certificate_where_a_ca_was_given(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path / "stranger")
    files = authority.host("public", "127.0.0.1")
    async with serving(files.certificates()) as server:
        fitting = authority.host("client", "client")
        async with client(server.address, trusting(files, show=fitting)) as known:
            assert (await known.get("/health")).status_code == 200
        for shown in (None, stranger.host("client", "client")):
            async with client(server.address, trusting(files, show=shown)) as unknown:
                # Over TLS 1.3 a client hears of it as it reads.
                with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                    await unknown.get("/health")
