"""The gRPC service over Connect, with raw HTTP: envelopes, codecs, errors, deadlines, bounds."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from google.rpc import error_details_pb2
from prometheus_client import CollectorRegistry

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Internal, Overloaded, Unauthenticated
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import with_cors
from batonlm.router.api.http.body import MAX_BODY_BYTES
from batonlm.router.api.http.server import serve_http
from batonlm.v1 import inference_pb2 as pb
from tests.services.router_http.scripted import ANYONE, MODEL, Scripted, http_app, whole_answer

CHAT, GENERATE, MODELS = (
    f"/baton.v1.Inference/{name}" for name in ("Chat", "Generate", "ListModels")
)
JSON, PROTO = "application/connect+json", "application/connect+proto"


def envelope(message: bytes | dict[str, Any], flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def envelopes(body: bytes) -> list[tuple[int, bytes]]:
    found = []
    while body:
        flags, length = struct.unpack_from(">BI", body)
        found.append((flags, body[5 : 5 + length]))
        assert len(found[-1][1]) == length
        body = body[5 + length :]
    return found


async def streamed(
    http: httpx.AsyncClient, message: bytes | dict[str, Any], path: str = GENERATE, **headers: str
) -> tuple[list[bytes], dict[str, Any]]:
    """The messages of an answer, and what its last envelope says."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named = {"content-type": JSON, "connect-protocol-version": "1"} | named
    content = message if isinstance(message, bytes) else envelope(message)
    response = await http.post(path, content=content, headers=named)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == named["content-type"]
    *messages, (flags, last) = envelopes(response.content)
    assert flags == 2 and not any(flags for flags, _ in messages)
    return [message for _, message in messages], json.loads(last)


def text_of(messages: list[bytes]) -> str:
    return "".join(json.loads(m)["event"].get("delta", {}).get("text", "") for m in messages)


async def failure(http: httpx.AsyncClient, message: Any, path: str = GENERATE, **h: str) -> Any:
    messages, last = await streamed(http, message, path, **h)
    assert not messages
    return last["error"]


def field_of(error: dict[str, Any]) -> str:
    (found,) = [d for d in error["details"] if d["type"] == "google.rpc.BadRequest"]
    raw = base64.b64decode(found["value"] + "==")
    return str(error_details_pb2.BadRequest.FromString(raw).field_violations[0].field)


async def test_a_stream_in_json(http: httpx.AsyncClient) -> None:
    messages, last = await streamed(http, {"text": "ab"})
    assert last == {}
    assert text_of(messages) == whole_answer("ab", 0)
    first, final = json.loads(messages[0]), json.loads(messages[-1])
    assert first["event"]["accepted"]["promptTokens"] == 2
    assert final["event"]["finished"]["completionTokens"] > 2


async def test_a_stream_in_binary(http: httpx.AsyncClient, frontend: Scripted) -> None:
    message = pb.ChatRequest()
    message.messages.add(role="user", content="ab")
    message.options.n = 2
    sent = envelope(message.SerializeToString())
    messages, last = await streamed(http, sent, CHAT, content_type=PROTO)
    events = [pb.ChatResponse.FromString(message).event for message in messages]
    assert last == {}
    for choice in (0, 1):
        text = "".join(e.delta.text for e in events if e.delta.choice == choice)
        assert text == whole_answer("<user>ab", choice)
    assert frontend.seen[0].n == 2


async def test_models(http: httpx.AsyncClient) -> None:
    response = await http.post(MODELS, json={})
    assert response.json()["models"][0]["name"] == MODEL.name
    binary = await http.post(MODELS, headers={"content-type": "application/proto"})
    assert binary.headers["content-type"] == "application/proto"
    assert pb.ListModelsResponse.FromString(binary.content).models[0].name == MODEL.name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            {"text": "ab", "options": {"sampling": {"temperature": -1}}},
            "options.sampling.temperature",
        ),
        ({"text": "ab", "options": {"sampling": {"heat": 1}}}, "options.sampling.heat"),
        ({"prompts": "ab"}, "prompts"),
        ({}, "prompt"),
        ({"text": 5}, "body"),
        ({"options": [5]}, "body"),
        *((envelope(data), "body") for data in (b"5", b"null", b"[]", b'"x"', b'{"text":"\xff"}')),
        (envelope(b"{"), "body"),
        (envelope(b"[" * 100_000), "body"),
        (envelope(b"{}") * 2, "body"),
        (envelope(b"{}", flags=2), "body"),
        (envelope(b"{}")[:-1], "body"),
        (b"", "body"),
    ],
)
async def test_wrong_messages_name_their_field(
    http: httpx.AsyncClient, frontend: Scripted, message: Any, field: str
) -> None:
    error = await failure(http, message)
    assert error["code"] == "invalid_argument" and error["message"]
    assert field_of(error) == field
    assert len(frontend.faults) == 1, "it counts against whoever sent it"


async def test_a_wrong_binary_message(http: httpx.AsyncClient) -> None:
    error = await failure(http, envelope(b"\xff\xff"), content_type=PROTO)
    assert (error["code"], field_of(error)) == ("invalid_argument", "body")


async def test_compressed_messages_are_refused(http: httpx.AsyncClient) -> None:
    for sent, headers in (
        (envelope(b"{}", flags=1), {}),
        (envelope(b"{}"), {"connect_content_encoding": "gzip"}),
    ):
        assert (await failure(http, sent, **headers))["code"] == "unimplemented"


async def test_versions_and_timeouts(http: httpx.AsyncClient, frontend: Scripted) -> None:
    ask: dict[str, Any] = {"text": "ab"}
    assert field_of(await failure(http, ask, connect_protocol_version="2"))
    for wrong in ("soon", "-1", "1" * 11, "1.5"):
        error = await failure(http, ask, connect_timeout_ms=wrong)
        assert field_of(error) == "connect-timeout-ms"
    assert (await failure(http, ask, connect_timeout_ms="0"))["code"] == "deadline_exceeded"
    assert not frontend.seen
    await streamed(http, ask, connect_timeout_ms="1500")
    assert frontend.seen[0].deadline_s == 1.5


async def test_failures_before_and_within_a_stream(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    frontend.refusal = Overloaded("too much", retry_after_s=2.0)
    error = await failure(http, {"text": "ab"})
    assert (error["code"], error["message"]) == ("resource_exhausted", "too much")
    assert {d["type"] for d in error["details"]} == {"google.rpc.ErrorInfo", "google.rpc.RetryInfo"}
    frontend.refusal = None
    unknown = await failure(http, {"text": "ab", "model": "nobody"})
    assert (unknown["code"], field_of(unknown)) == ("not_found", "model")
    for raised, code in (
        (Internal("a worker broke"), "internal"),
        (ValueError("secret"), "internal"),
    ):
        frontend.failure = raised
        messages, last = await streamed(http, {"text": "ab"})
        assert len(messages) == 2
        assert last["error"]["code"] == code and "secret" not in str(last)


async def test_kinds_sizes_and_routes(http: httpx.AsyncClient) -> None:
    refused = await http.post(GENERATE, json={"text": "ab"})
    assert refused.status_code == 415
    assert refused.headers["accept-post"] == f"{JSON}, {PROTO}"
    large = await failure(http, envelope(b" " * MAX_BODY_BYTES))
    assert large["code"] == "resource_exhausted"
    unknown = await http.post("/baton.v1.Inference/Sing", content=b"")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unimplemented")
    assert (await http.get(MODELS)).status_code == 405


async def test_a_large_prompt_of_tokens(http: httpx.AsyncClient, frontend: Scripted) -> None:
    await streamed(http, {"tokenIds": {"ids": [65] * 4000}})
    assert len(frontend.seen[0].prompt.token_ids) == 4000  # type: ignore[union-attr]


async def test_a_client_that_leaves_ends_its_request(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    frontend.hold = True
    sent = {"content": envelope({"text": "ab"}), "headers": {"content-type": JSON}}
    async with http.stream("POST", GENERATE, **sent) as response:  # type: ignore[arg-type]
        async for _ in response.aiter_raw():
            break
        assert frontend.open_streams == 1
    await asyncio.wait_for(frontend.closed.wait(), 30)


class Keys:
    """Knows one key."""

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        if list(authorization) != ["Bearer right"]:
            raise Unauthenticated("this key is not known")
        return Tenant("acme")

    async def run(self) -> None:
        """Its key does not change."""


async def test_keys_and_cors() -> None:
    page = "https://page.example"
    frontend = Scripted()
    app = with_cors(http_app(frontend, CollectorRegistry(), HttpAccess(Keys())), [page])
    server = await serve_http(app, "127.0.0.1:0")
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{server.address}", timeout=120, trust_env=False
        ) as http:
            ask = {"text": "ab"}
            error = await failure(http, ask, authorization="Bearer wrong", origin=page)
            assert error["code"] == "unauthenticated"
            unary = await http.post(MODELS, json={})
            assert (unary.status_code, unary.json()["code"]) == (401, "unauthenticated")
            await streamed(http, ask, authorization="Bearer right", origin=page)
            assert frontend.seen[0].tenant.name == "acme"
            allowed = await http.options(
                CHAT,
                headers={
                    "origin": page,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "connect-protocol-version,content-type",
                },
            )
            assert allowed.headers["access-control-allow-origin"] == page
            assert "connect-protocol-version" in allowed.headers["access-control-allow-headers"]
    finally:
        await server.close()


async def test_a_server_that_closes_says_so_in_the_last_envelope(frontend: Scripted) -> None:
    frontend.hold = True
    server = await serve_http(http_app(frontend, CollectorRegistry(), ANYONE), "127.0.0.1:0")
    async with httpx.AsyncClient(
        base_url=f"http://{server.address}", timeout=120, trust_env=False
    ) as http:
        asking = asyncio.create_task(streamed(http, {"text": "ab"}))
        await asyncio.wait_for(frontend.started.wait(), 30)
        await server.close()
        messages, last = await asking
    assert messages and last["error"]["code"] == "unavailable"
