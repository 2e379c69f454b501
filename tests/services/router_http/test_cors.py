"""Which web pages a browser lets call HTTP, by the headers that it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.errors import InvalidArgument
from batonlm.router.api.http.app import with_cors
from batonlm.router.api.http.server import serve_http
from batonlm.router.config import RouterConfig
from tests.services.router_http.scripted import ANYONE, Scripted, http_app

PAGE, OTHER = "http://localhost:3000", "https://elsewhere.example"
MODELS = "/v1/models"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@asynccontextmanager
async def serving(*origins: str) -> AsyncIterator[httpx.AsyncClient]:
    app = http_app(Scripted(), CollectorRegistry(), ANYONE)
    server = await serve_http(with_cors(app, origins) if origins else app, "127.0.0.1:0")
    base = f"http://{server.address}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
            yield client
    finally:
        await server.close()


async def test_a_page_of_a_named_origin_may_call() -> None:
    async with serving(PAGE) as http:
        asked = {"origin": PAGE, **PREFLIGHT}
        allowed = await http.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "POST" in allowed.headers["access-control-allow-methods"]
        for name in PREFLIGHT["access-control-request-headers"].split(","):
            assert name in allowed.headers["access-control-allow-headers"]
        answer = await http.get(MODELS, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        # An error can be read by the page, too.
        wrong = await http.get("/v1/nothing", headers={"origin": PAGE})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (404, PAGE)
        for response in (allowed, answer, wrong):
            assert "access-control-allow-credentials" not in response.headers


async def test_a_page_of_another_origin_may_not() -> None:
    async with serving(PAGE) as http:
        refused = await http.options(MODELS, headers={"origin": OTHER, **PREFLIGHT})
        assert refused.status_code == 400
        answer = await http.get(MODELS, headers={"origin": OTHER})
        for response in (refused, answer):
            assert "access-control-allow-origin" not in response.headers


async def test_without_the_option_no_page_may() -> None:
    async with serving() as http:
        answer = await http.get(MODELS, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
        preflight = await http.options(MODELS, headers={"origin": PAGE, **PREFLIGHT})
        assert preflight.status_code == 405


@pytest.mark.parametrize("origin", ("localhost:3000", "http://a/", "HTTP://A", "ftp://a", "null"))
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(cors_origins=(origin,))
    assert caught.value.field == "cors_origins"
