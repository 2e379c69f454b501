"""A process's server: health, reflection, limits, ports, and coming back on the same port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from batonlm.cli.ports import free_ports
from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.rpc.address import PortInUse
from batonlm.rpc.channels import INTERNAL_MESSAGE_BYTES, Channels
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.server import PUBLIC_RECEIVE_BYTES, Probes, ProcessServer
from tests.rpc.echo import NAME, Echo, call, stream, unary

Response = health_pb2.HealthCheckResponse
WITHIN_S = 120.0


@asynccontextmanager
async def serving(
    listen: str = "127.0.0.1:0", *, public: bool = False, reflection: bool = True
) -> AsyncIterator[tuple[ProcessServer, str]]:
    server = ProcessServer(
        listen=listen, services=[Echo().service()], public=public, reflection=reflection
    )
    try:
        yield server, await server.start()
    finally:
        await server.stop(0)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels()
    try:
        yield channels
    finally:
        await channels.close()


async def test_readiness_and_liveness(channels: Channels) -> None:
    async with serving() as (server, address):
        stub = health_pb2_grpc.HealthStub(channels.get(address))

        async def status(service: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return str(Response.ServingStatus.Name(answer.status))

        assert (await status(""), await status(NAME)) == ("SERVING", "NOT_SERVING")
        server.set_serving(True)
        assert (await status(""), await status(NAME)) == ("SERVING", "SERVING")
        server.set_serving(False)
        assert (await status(""), await status(NAME)) == ("SERVING", "NOT_SERVING")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await status("test.Other")
        assert failed.value.code() is grpc.StatusCode.NOT_FOUND
        answer = await stub.List(health_pb2.HealthListRequest())
        assert {name: entry.status for name, entry in answer.statuses.items()} == {
            "": Response.SERVING,
            "startup": Response.SERVING,
            NAME: Response.NOT_SERVING,
        }


async def test_who_leaves_stays_not_ready_whatever_is_said_later(channels: Channels) -> None:
    async with serving() as (server, address):
        stub = health_pb2_grpc.HealthStub(channels.get(address))
        server.leave()
        server.set_serving(True)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME))
        assert answer.status == Response.NOT_SERVING


async def test_watching_readiness(channels: Channels) -> None:
    async with serving() as (server, address):
        stub = health_pb2_grpc.HealthStub(channels.get(address))
        seen = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        for serves in (True, False, True):
            answer = await asyncio.wait_for(seen.read(), WITHIN_S)
            assert answer.status == (Response.NOT_SERVING if serves else Response.SERVING)
            server.set_serving(serves)
        assert (await asyncio.wait_for(seen.read(), WITHIN_S)).status == Response.SERVING
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="test.Other"))
        assert (await unknown.read()).status == Response.SERVICE_UNKNOWN


async def test_reflection_is_a_choice(channels: Channels) -> None:
    async def names(address: str) -> set[str]:
        # Asked in one go: a write may meet a call that was refused already, and hide why.
        ask = channels.get(address).unary_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answer: Any = await ask(reflection_pb2.ServerReflectionRequest(list_services="")).read()
        return {service.name for service in answer.list_services_response.service}

    async with serving() as (_, address):
        assert {NAME, "grpc.health.v1.Health"} <= await names(address)
    async with serving(reflection=False) as (_, address):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await names(address)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving() as (_, address):
        with pytest.raises(PortInUse) as refused:
            async with serving(address):
                pass
    assert refused.value.field == "listen"
    assert refused.value.message.startswith(f"{address} is already in use")
    assert "add_port" not in capfd.readouterr().err


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":80"])
async def test_what_is_no_address_is_named(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="is not host:port") as refused:
        async with serving(listen):
            pass
    assert refused.value.field == "listen"


async def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(InvalidArgument, match="no address of this machine"):
        async with serving("192.0.2.1:0"):
            pass


async def test_nothing_stays_bound_when_metrics_cannot_be_served() -> None:
    async with serving() as (_, taken):
        free = _lasting_address()
        server = ProcessServer(listen=free, services=[], probes=Probes(metrics_listen=taken))
        with pytest.raises(PortInUse) as refused:
            await server.start()
        assert refused.value.field == "metrics_listen"
        await server.stop(0)
    async with serving(free) as (_, address):
        assert address == free


async def test_a_message_over_the_public_limit_ends_only_its_call(channels: Channels) -> None:
    async with serving(public=True) as (_, address):
        channel = channels.get(address)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary", bytes(PUBLIC_RECEIVE_BYTES + 1))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not from_rpc_error(failed.value).retryable
        assert await call(channel, "unary", b"small") == [b"small"]


async def test_internal_messages_may_be_large(channels: Channels) -> None:
    async with serving() as (_, address):
        large = bytes(8 * PUBLIC_RECEIVE_BYTES)
        assert await call(channels.get(address), "unary", large) == [large]


@pytest.mark.parametrize("method", ["unary", "generate"])
async def test_an_answer_that_cannot_be_sent_is_a_failure_and_no_silence(
    channels: Channels, method: str
) -> None:
    class Large(Echo):
        async def unary(self, request: bytes, context: object) -> bytes:
            return bytes(INTERNAL_MESSAGE_BYTES + 1)

        async def generate(self, request: bytes, context: object) -> AsyncIterator[bytes]:
            yield bytes(INTERNAL_MESSAGE_BYTES + 1)

    server = ProcessServer(listen="127.0.0.1:0", services=[Large().service()])
    try:
        channel = channels.get(await server.start())
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(call(channel, method, b""), WITHIN_S)
    finally:
        await server.stop(0)


async def test_a_server_that_comes_back_on_its_port_is_found(channels: Channels) -> None:
    async with serving(_lasting_address()) as (_, address):
        assert await call(channels.get(address), "unary", b"1") == [b"1"]
    await _until_refused(lambda: call(channels.get(address), "unary", b"2"))
    async with serving(address):
        async with asyncio.timeout(WITHIN_S):
            assert await unary(channels.get(address))(b"3", wait_for_ready=True) == b"3"


async def test_channels_are_reused_dropped_and_closed() -> None:
    channels = Channels()
    async with serving() as (_, address):
        channel = channels.get(address)
        assert channels.get(address) is channel
        assert await call(channel, "unary", b"1") == [b"1"]
        await channels.drop(address)
        assert channels.get(address) is not channel
        assert await call(channels.get(address), "unary", b"2") == [b"2"]
    await channels.close()
    await channels.close()
    with pytest.raises(Unavailable):
        channels.get(address)


async def test_stop_cancels_what_outlives_the_grace(channels: Channels) -> None:
    echo = Echo()
    server = ProcessServer(listen="127.0.0.1:0", services=[echo.service()])
    channel = channels.get(await server.start())
    running = stream(channel)(b"wait")
    assert await running.read() == b"wait"
    async with asyncio.timeout(WITHIN_S):
        await server.stop(0.1)
        assert await echo.ended.get() == "generate"
        await server.stop(0.1)


def _lasting_address() -> str:
    """Of a port that the system gives to nobody while no server listens there."""
    return f"127.0.0.1:{free_ports(1)[0]}"


async def _until_refused(attempt: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await attempt()
            except grpc.aio.AioRpcError as error:
                assert isinstance(from_rpc_error(error), Unavailable)
                return


BUSY_S = 33.0
"""Longer than gRPC by itself lets a call wait that no handler has taken up."""


@pytest.mark.slow
async def test_calls_wait_for_a_process_that_is_busy(channels: Channels) -> None:
    """Otherwise their callers read CANCELLED, who have cancelled nothing."""
    async with serving_beside(public=True) as (address, loop, _):
        loop.call_soon_threadsafe(time.sleep, BUSY_S)
        texts = [b"%d" % number for number in range(5)]
        channel = channels.get(address)
        found = await asyncio.gather(*(unary(channel)(t, timeout=WITHIN_S) for t in texts))
        assert found == texts


async def test_a_server_that_stops_answers_what_has_arrived(channels: Channels) -> None:
    """gRPC drops calls that were not taken up, and their callers read CANCELLED."""
    async with serving_beside(grace_s=WITHIN_S) as (address, loop, over):
        channel = channels.get(address)
        assert await unary(channel)(b"connected") == b"connected"
        sent = threading.Event()

        def stop_with_calls_waiting() -> None:
            sent.wait(WITHIN_S)
            over.set()

        loop.call_soon_threadsafe(stop_with_calls_waiting)
        calls = [unary(channel)(b"late", timeout=WITHIN_S) for _ in range(20)]
        # Those that do not arrive meanwhile are answered in the same way.
        await asyncio.sleep(1.0)
        sent.set()
        for call in calls:
            try:
                assert await call == b"late"
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def serving_beside(
    *, public: bool = False, grace_s: float = 0
) -> AsyncIterator[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]]:
    """A server in a thread: its address, its loop, and what stops it there."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        async with serving(public=public) as (server, address):
            started.set_result((address, asyncio.get_running_loop(), over))
            await over.wait()
            await server.stop(grace_s)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, over = await asyncio.wait_for(asyncio.wrap_future(started), WITHIN_S)
    try:
        yield address, loop, over
    finally:
        with suppress(RuntimeError):  # It has stopped.
            loop.call_soon_threadsafe(over.set)
        await asyncio.to_thread(thread.join, WITHIN_S)
