"""A server that has a token answers those who show it, and nobody else but who asks for health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from batonlm.core.errors import InvalidArgument, Unauthenticated
from batonlm.rpc import config, peers
from batonlm.rpc.channels import Channels, open_channel
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.options import TlsOptions
from batonlm.rpc.server import ProcessServer
from tests.rpc.authority import Authority
from tests.rpc.echo import METHODS, Echo, call, unary

TOKEN = "0123456789abcdef" * 4
PATIENCE_S = 120.0


@asynccontextmanager
async def serving(token: str = TOKEN, *, public: bool = False) -> AsyncIterator[str]:
    server = ProcessServer(
        listen="127.0.0.1:0", services=[Echo().service()], token=token, public=public
    )
    address = await server.start()
    server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


async def is_refused(channel: grpc.aio.Channel, method: str) -> None:
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, b"a")
        # Where a write meets the refusal, grpc.aio says this in its place: see `calls.abandon`.
        if caught.value.details() != "Internal error from Core":
            break
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(from_rpc_error(caught.value), Unauthenticated)
    assert TOKEN not in str(caught.value)


async def test_who_shows_the_token_is_answered_and_nobody_else() -> None:
    async with serving() as address:
        channels = {shown: Channels(token=shown) for shown in ("", "wrong", TOKEN[:-1], TOKEN)}
        for shown, opened in channels.items():
            for method in METHODS:
                if shown == TOKEN:
                    assert await call(opened.get(address), method, b"a") == [b"a"]
                else:
                    await is_refused(opened.get(address), method)
            await opened.close()


async def test_a_token_goes_beside_what_a_call_has_of_its_own() -> None:
    async with serving() as address, open_channel(address, token=TOKEN) as channel:
        own = (("x-request-id", "r-1"),)
        assert await unary(channel)(b"a", metadata=own, timeout=PATIENCE_S) == b"a"
        # Two of them are not one.
        twice = ((peers.PEER_TOKEN_KEY, TOKEN),)
        with pytest.raises(grpc.aio.AioRpcError):
            await unary(channel)(b"a", metadata=twice, timeout=PATIENCE_S)


async def test_health_needs_none_and_reflection_does() -> None:
    async with serving() as address, open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        found = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ServerReflectionInfo(asked, timeout=PATIENCE_S).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_public_port_is_not_asked_for_it_and_without_one_nobody_is() -> None:
    async with serving(public=True) as address, open_channel(address) as channel:
        assert await call(channel, "unary", b"a") == [b"a"]
    async with serving("") as address, open_channel(address, token=TOKEN) as channel:
        assert await call(channel, "unary", b"a") == [b"a"]


async def test_certificates_and_a_token_are_asked_for_together(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = authority.role("router").certificates()
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[],
        certificates=authority.role("prefill").certificates(),
        token=TOKEN,
    )
    address = await server.start()
    try:
        for token in ("", TOKEN):
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            async with open_channel(address, ours, "prefill", token=token) as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                answer = stub.ServerReflectionInfo(asked, timeout=PATIENCE_S)
                if token:
                    assert (await answer.read()).HasField("list_services_response")
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answer.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await server.stop(0)


def test_it_is_never_printed_and_must_be_fit_to_be_sent() -> None:
    variables = {peers.PEER_TOKEN_VARIABLE: TOKEN}
    options = config.load(TlsOptions, [], variables, prog="test")
    assert options.peer_token == TOKEN
    assert TOKEN not in config.describe(options)
    for wrong in ("with blank", "umlaut-ü", "line\n"):
        with pytest.raises(InvalidArgument) as caught:
            TlsOptions(peer_token=wrong)
        assert caught.value.field == "peer_token"
