"""Everything a router serves asks for a key, but for what is named here; all faces, all calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from batonlm.core.admission.api_keys import KeyBook, KeyIndex, TenantLimits
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unauthenticated
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.adapters import RouterAdaptersServicer
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.http.server import serve_http
from batonlm.router.api.vllm import engine_service
from batonlm.router.api.vllm.engine import SERVICE as VLLM
from batonlm.router.config import RouterConfig
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.channels import open_channel
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.server import ProcessServer
from batonlm.v1 import adapters_pb2, adapters_pb2_grpc, inference_pb2_grpc
from batonlm.v1 import inference_pb2 as pb
from tests.services.router_http.scripted import Scripted, grpc_server, http_app

OPEN_ROUTES = {
    (method, path)
    for method in ("GET", "HEAD")
    for path in ("/health", "/ping", "/docs", "/openapi.json")
}
OPEN_CALLS = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
LIMITS = TenantLimits(weight=3.0, requests_per_minute=60, tokens_per_minute=1000, max_tokens=77)


class IndexAuthenticator:
    """A authenticator with keys that do not change."""

    def __init__(self, book: KeyBook) -> None:
        self._index = KeyIndex(book)

    def authenticate(self, authorization: Any) -> Tenant:
        found = self._index.find("".join(authorization).removeprefix("Bearer "))
        if found is None:
            raise Unauthenticated("no")
        return found

    async def run(self) -> None:
        return


@dataclass
class Router:
    """Both faces. headers and metadata: what a caller with a key sends."""

    key: str
    book: KeyBook
    frontend: Scripted
    app: HttpApp
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.headers.items())


@asynccontextmanager
async def serving(*, token: str = "") -> AsyncIterator[Router]:
    book, key = KeyBook().with_key("acme", LIMITS, "")
    authenticator, frontend = IndexAuthenticator(book), Scripted()
    http_access = HttpAccess(authenticator, token=token)
    app = http_app(frontend, CollectorRegistry(), http_access)
    pipeline = cast(Pipeline, frontend)
    servicer = InferenceServicer(pipeline, stall_timeout_s=20)
    engine = engine_service(pipeline, cast(Fleet, None), RouterConfig(vllm_engine=True))
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service(), engine, RouterAdaptersServicer(pipeline).service()],
        public=True,
        interceptors=[KeyInterceptor(authenticator)],
    )
    http = await serve_http(app, "127.0.0.1:0")
    try:
        async with (
            open_channel(await server.start()) as channel,
            httpx.AsyncClient(
                base_url=f"http://{http.address}", timeout=120, trust_env=False
            ) as client,
        ):
            headers = {"authorization": f"Bearer {key}"}
            yield Router(key, book, frontend, app, client, channel, headers)
    finally:
        await http.close()
        await server.stop(0)


async def test_every_route_but_health_refuses_who_shows_no_key() -> None:
    async with serving() as router:
        routes = [route for route in router.app.routes if isinstance(route, Route)]
        assert len(routes) >= 8
        tried = {
            (method, route.path.replace("{model:path}", "org/scripted"))
            for route in routes
            for method in (*(route.methods or ()), "DELETE", "OPTIONS")
        }
        tried |= {
            ("GET", "/"),
            ("POST", "/health"),
            ("GET", "/health%2f..%2fv1"),
            ("GET", "/health/"),
        }
        for method, path in sorted(tried - OPEN_ROUTES):
            for headers in ({}, {"authorization": "Bearer baton-wrong"}, {"api-key": router.key}):
                answer = await router.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                if path.startswith("/baton.v1."):
                    assert method == "HEAD" or answer.json()["code"] == "unauthenticated"
                elif path.startswith("/api/"):
                    assert method == "HEAD" or answer.json().keys() == {"error"}
                elif method != "HEAD":
                    if not path.startswith(("/v1/messages", "/messages")):
                        assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for method, path in OPEN_ROUTES & tried:
            assert (await router.http.request(method, path)).status_code == 200
        assert (await router.http.get("/v1/models", headers=router.headers)).status_code == 200
        assert (await router.http.get("/nothing", headers=router.headers)).status_code == 404
        assert not router.frontend.seen


async def test_batons_own_token_opens_metrics_and_nothing_else() -> None:
    async with serving(token="t0ken") as router:
        for shown, code in (("Bearer t0ken", 200), ("Bearer t0ke", 401), ("Bearer", 401)):
            headers = {"authorization": shown}
            assert (await router.http.get("/metrics", headers=headers)).status_code == code
            assert (await router.http.post("/metrics", headers=headers)).status_code == 401
            assert (await router.http.get("/v1/models", headers=headers)).status_code == 401
    async with serving() as router:
        for shown in ("Bearer", ""):
            headers = {"authorization": shown}
            assert (await router.http.get("/metrics", headers=headers)).status_code == 401


async def test_every_call_but_health_refuses_who_shows_no_key() -> None:
    async with serving() as router:
        methods = [method async for method in _methods(router)]
        assert {"/baton.v1.Inference/Generate", "/baton.v1.Inference/Chat"} < set(methods)
        assert {f"/{VLLM}/{name}" for name in ("Generate", "Abort", "HealthCheck")} < set(methods)
        assert "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" in methods
        assert set(methods) > OPEN_CALLS
        for method in (*methods, "/baton.v1.Inference/Nothing", "/no.Such/Thing"):
            if method in OPEN_CALLS:
                continue
            for metadata in ((), (("authorization", "Bearer baton-wrong"),)):
                # A caller that never sends a message is told at once, too.
                call: Any = router.channel.stream_stream(method)(metadata=metadata, timeout=120)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
                assert isinstance(from_rpc_error(caught.value), Unauthenticated)
        health = health_pb2_grpc.HealthStub(router.channel)
        alive = await health.Check(health_pb2.HealthCheckRequest(), timeout=120)
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
        assert not router.frontend.seen


async def test_the_tenant_of_the_key_is_the_requests_on_both_faces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as router:
        body = {"prompt": "hello", "max_tokens": 3, "cache_salt": "mine"}
        # Ids that clients choose are not taken for anything.
        headers = {**router.headers, "x-request-id": "chosen"}
        answer = await router.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] != "chosen"
        stub = inference_pb2_grpc.InferenceStub(router.channel)
        asked = pb.GenerateRequest(text="hello")
        asked.options.stop.max_tokens = 3
        metadata = (*router.metadata, ("x-request-id", "chosen"))
        async for _ in stub.Generate(asked, metadata=metadata, timeout=120):
            pass
        over_http, over_grpc = router.frontend.seen
        tenant = router.book.tenant("acme")
        for request in (over_http, over_grpc):
            assert request.tenant == tenant
            assert (request.tenant.requests_per_minute, request.tenant.max_tokens) == (60, 77)
        assert over_http.cache_salt == tenant.salted(b"mine")
        assert over_grpc.cache_salt == tenant.salted(b"")
    assert router.key not in caplog.text
    assert router.key.removeprefix("baton-") not in caplog.text


async def test_adapters_are_changed_by_operators_only() -> None:
    async with serving() as router:
        body = {"lora_name": "a", "lora_path": "a"}
        for path in ("load_lora_adapter", "unload_lora_adapter"):
            for prefix in ("", "/v1"):
                answer = await router.http.post(
                    f"{prefix}/{path}", json=body, headers=router.headers
                )
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "operator_key_required"
        stub: Any = adapters_pb2_grpc.AdaptersStub(router.channel)
        calls = (
            (stub.LoadAdapter, adapters_pb2.LoadAdapterRequest(name="a", path="a")),
            (stub.UnloadAdapter, adapters_pb2.UnloadAdapterRequest(name="a")),
        )
        for call, message in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, metadata=router.metadata, timeout=120)
            assert isinstance(from_rpc_error(caught.value), Unauthenticated)


async def test_no_web_page_calls_a_router_without_keys_over_grpc() -> None:
    """A browser that speaks HTTP/2 can make a call of a page's bytes, and says whose they are."""
    server = grpc_server(Scripted())
    async with open_channel(await server.start()) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = pb.ListModelsRequest()
        assert (await stub.ListModels(asked, timeout=120)).models
        for origin in ("https://evil.example", "null", ""):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListModels(asked, metadata=(("origin", origin),), timeout=120)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(caught.value).field == "origin"
    await server.stop(0)


async def test_two_authorization_headers_are_not_read_as_one_key() -> None:
    async with serving() as router:
        doubled = [("authorization", f"Bearer {router.key}"), ("authorization", "Bearer x")]
        assert (await router.http.get("/v1/models", headers=doubled)).status_code == 401


async def _methods(router: Router) -> AsyncIterator[str]:
    """All that the server says it serves."""
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)

    async def ask(**wanted: str) -> Any:
        async def requests() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(**wanted)

        call = stub.ServerReflectionInfo(requests(), metadata=router.metadata, timeout=120)
        async for answer in call:
            return answer

    listed = await ask(list_services="")
    for service in listed.list_services_response.service:
        found = await ask(file_containing_symbol=service.name)
        for raw in found.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for described in file.service:
                if f"{file.package}.{described.name}" == service.name:
                    for method in described.method:
                        yield f"/{service.name}/{method.name}"
