"""The socket side: what is on the wire, limits on clients, and an orderly end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.errors import InvalidArgument
from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.router.api.http import answer_schema as answers
from batonlm.router.api.http import generation
from batonlm.router.api.http.connections import HttpLimits
from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.rpc.address import PortInUse
from tests.services.router_http.scripted import (
    ADAPTER,
    ANYONE,
    MODEL,
    Scripted,
    http_app,
    whole_answer,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def serving(frontend: Scripted, limits: HttpLimits) -> AsyncIterator[HttpServer]:
    server = await serve_http(
        http_app(frontend, CollectorRegistry(), ANYONE), "127.0.0.1:0", limits=limits
    )
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def connected(
    server: HttpServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = server.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def post(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_a_stream_on_the_wire(http: httpx.AsyncClient) -> None:
    response = await http.post(
        CHAT, json={**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "00000001"
    assert response.headers["x-baton-seed"] == "7"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    first, *middle, finish, usage = [json.loads(event[6:]) for event in events[:-1]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 11
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole_answer("<user>hello", 0)


async def test_characters_of_several_bytes_arrive_whole(server: HttpServer) -> None:
    """Looked at piece by piece as they come from the socket, undecoded."""
    async with connected(server) as (reader, writer):
        writer.write(post(json.dumps({**HELLO, "stream": True}).encode()))
        lines = []
        async with asyncio.timeout(120):
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                lines.append(line)
    chunks = [json.loads(line[6:].decode()) for line in lines if line.startswith(b"data: ")]
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert {"é", "世", "🎉"} <= set(contents)
    assert "\ufffd" not in "".join(contents)


async def test_comments_keep_an_idle_stream_open(
    http: httpx.AsyncClient, frontend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.01)
    frontend.hold = True
    async with http.stream("POST", CHAT, json={**HELLO, "stream": True}) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if ": keep-alive\n\n" in text:
                frontend.release.set()
    assert text.endswith("data: [DONE]\n\n")
    said = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    content = "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in said)
    assert content == whole_answer("<user>hello", 0)


async def test_a_stream_that_fails_ends_with_the_error(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    frontend.failure = InvalidArgument("no more")
    response = await http.post(CHAT, json={**HELLO, "stream": True})
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last[6:])["error"]["message"] == "no more"


async def test_health_follows_the_frontend(http: httpx.AsyncClient, frontend: Scripted) -> None:
    for ready, status in ((True, 200), (False, 503)):
        frontend.is_ready = ready
        for path in ("/health", "/ping"):
            response = await http.get(path)
            assert (response.status_code, response.content) == (status, b"")


async def test_version_metrics_and_head(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json().keys() == {"version"}
    metrics = await http.get("/metrics")
    assert "baton_tests_total 3.0" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")
    head = await http.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert (await http.head("/health")).status_code == 200


async def test_models_on_the_wire(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    model, adapter = listed["data"]
    assert (model["id"], model["root"], model["parent"]) == (MODEL.name, MODEL.name, None)
    assert model["max_model_len"] == MODEL.max_model_len
    assert (adapter["id"], adapter["root"], adapter["parent"]) == (
        ADAPTER.name,
        MODEL.name,
        MODEL.name,
    )
    assert (await http.get(f"/v1/models/{MODEL.name}")).json() == model


async def test_a_port_in_use_names_the_setting(server: HttpServer) -> None:
    with pytest.raises(PortInUse) as caught:
        await serve_http(http_app(Scripted(), CollectorRegistry(), ANYONE), server.address)
    assert caught.value.field == "http_listen"
    assert server.address in caught.value.message


@pytest.mark.parametrize("listen", ["", "localhost", "127.0.0.1:x", "127.0.0.1:70000", ":1"])
async def test_what_is_no_address_names_the_setting(listen: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await serve_http(http_app(Scripted(), CollectorRegistry(), ANYONE), listen)
    assert caught.value.field == "http_listen"


async def test_headers_that_are_too_large(http: httpx.AsyncClient, server: HttpServer) -> None:
    response = await http.get("/health", headers={"x-large": "x" * 20_000})
    assert response.status_code == 431
    async with connected(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nx-endless: " + b"x" * 20_000)
        answer = await asyncio.wait_for(reader.read(), 120)
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET\r\n\r\n"])
async def test_what_is_no_http(server: HttpServer, garbage: bytes) -> None:
    async with connected(server) as (reader, writer):
        writer.write(garbage)
        answer = await asyncio.wait_for(reader.read(), 120)
    assert answer.startswith(b"HTTP/1.1 400 ")


PATHS = {
    CHAT: answers.ErrorAnswer,
    "/v1/messages": answers.MessagesError,
    "/api/chat": answers.OllamaError,
}
REFUSED = {
    "host": (b"host: a b", 400),
    "framing": (b"host: x\r\ntransfer-encoding: gzip, chunked", 400),
    "broken": (b"host: x\r\ntransfer-encoding: chunked", 400),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", REFUSED)
async def test_what_the_edge_refuses_has_the_form_of_its_path(
    server: HttpServer, path: str, how: str
) -> None:
    field, status = REFUSED[how]
    async with connected(server) as (reader, writer):
        writer.write(b"POST %b HTTP/1.1\r\n%b\r\n\r\nzz\r\n" % (path.encode(), field))
        answer = await asyncio.wait_for(reader.read(), 120)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close" in head
    msgspec.json.decode(body, type=PATHS[path])


async def test_a_head_that_does_not_end_is_cut() -> None:
    async with (
        serving(Scripted(), HttpLimits(head_timeout_s=0.05)) as server,
        connected(server) as (slow, slow_writer),
        connected(server) as (silent, _),
    ):
        slow_writer.write(b"POST /v1/completions HTTP/1.1\r\nx: ")
        assert await asyncio.wait_for(slow.read(), 120) == b""
        assert await asyncio.wait_for(silent.read(), 120) == b""


async def test_a_client_that_does_not_read_is_cut() -> None:
    """Its answer is larger than what the sockets between us hold."""
    frontend = Scripted()
    body = {"prompt": "x" * 4_000, "max_tokens": 5_000, "n": 16, "stream": True}
    data = json.dumps(body).encode()
    limits = HttpLimits(stall_timeout_s=0.2)
    async with serving(frontend, limits) as server, connected(server) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await asyncio.wait_for(frontend.closed.wait(), 120)
        assert frontend.open_streams == 0


@pytest.mark.deep
async def test_connections_are_bounded() -> None:
    """One that is idle makes room for the next; one with a request does not."""
    frontend = Scripted(hold=True)
    async with (
        serving(frontend, HttpLimits(max_connections=1)) as server,
        connected(server) as (idle, idle_writer),
    ):
        idle_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with connected(server) as (busy, busy_writer):
            busy_writer.write(post(json.dumps({**HELLO, "stream": True}).encode()))
            assert (await asyncio.wait_for(idle.read(), 120)).startswith(b"HTTP/1.1 200 ")
            await asyncio.wait_for(frontend.started.wait(), 120)
            async with connected(server) as (third, third_writer):
                third_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = asyncio.ensure_future(third.readline())
                assert server.num_connections == 1
                await asyncio.sleep(0.1)
                assert not answer.done() and server.num_connections == 1
                frontend.release.set()
                assert b"data: [DONE]" in await asyncio.wait_for(
                    busy.readuntil(b"data: [DONE]"), 30
                )
                assert (await asyncio.wait_for(answer, 120)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.deep
async def test_leaving_is_seen_behind_a_pipelined_request(
    server: HttpServer, frontend: Scripted
) -> None:
    frontend.hold = True
    async with connected(server) as (reader, writer):
        writer.write(post(json.dumps({**HELLO, "stream": True}).encode()))
        await asyncio.wait_for(reader.readuntil(b"assistant"), 120)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await writer.drain()
    await asyncio.wait_for(frontend.closed.wait(), 120)
    assert frontend.open_streams == 0


async def test_a_pipelined_request_leaves_the_running_answer_whole(
    server: HttpServer, frontend: Scripted
) -> None:
    async with connected(server) as (reader, writer):
        writer.write(post(json.dumps(HELLO).encode()) + b"no HTTP at all\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 120)
    first, _, second = answer.partition(b"HTTP/1.1 400 ")
    assert first.startswith(b"HTTP/1.1 200 ") and b"connection: close" in second
    assert whole_answer("<user>hello", 0).encode() in first
    assert len(frontend.seen) == 1


async def test_closing_lets_answers_end_and_then_cancels() -> None:
    frontend = Scripted(hold=True)
    server = await serve_http(http_app(frontend, CollectorRegistry(), ANYONE), "127.0.0.1:0")
    async with httpx.AsyncClient(
        base_url=f"http://{server.address}", timeout=120, trust_env=False
    ) as client:
        answer = asyncio.ensure_future(client.post(CHAT, json=HELLO))
        await asyncio.wait_for(frontend.started.wait(), 120)
        closing = asyncio.ensure_future(server.close(grace_s=60))
        await asyncio.sleep(0)
        frontend.release.set()
        assert (await answer).status_code == 200
        await asyncio.wait_for(closing, 120)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")

    stuck = Scripted(hold=True)
    server = await serve_http(http_app(stuck, CollectorRegistry(), ANYONE), "127.0.0.1:0")
    async with httpx.AsyncClient(
        base_url=f"http://{server.address}", timeout=120, trust_env=False
    ) as client:
        answer = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": True}))
        await asyncio.wait_for(stuck.started.wait(), 120)
        await asyncio.wait_for(server.close(grace_s=0.05), 120)
        assert stuck.open_streams == 0
        last = (await answer).text.removesuffix("\n\n").rpartition("data: ")[2]
        assert json.loads(last)["error"]["retryable"] is True
        await server.close()


async def test_a_request_says_what_trace_it_is_part_of(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    await http.post(CHAT, json=HELLO, headers={"Traceparent": traceparent, "TraceState": "v=1"})
    await http.post(CHAT, json=HELLO)
    assert [request.trace for request in frontend.seen] == [
        TraceContext(traceparent, "v=1"),
        UNTRACED,
    ]
