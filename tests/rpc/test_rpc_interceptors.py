"""What a handler raises reaches the client as a status, for every kind of call."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from batonlm.core.errors import Overloaded
from batonlm.rpc.errors import from_rpc_error
from tests.rpc.echo import METHODS, Echo, call, stream, talk, unary

SERVED_WITHIN_S = 120.0


@pytest.mark.parametrize("method", METHODS)
async def test_answers_pass_through(channel: grpc.aio.Channel, method: str) -> None:
    assert await call(channel, method, b"hello") == [b"hello"]


@pytest.mark.parametrize("method", METHODS)
async def test_a_foreseen_failure_keeps_its_details(
    channel: grpc.aio.Channel, echo: Echo, method: str
) -> None:
    echo.error = Overloaded("the queue is full", field="f", retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, method, b"hello")
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.details() == "the queue is full"
    error = from_rpc_error(failed.value)
    assert isinstance(error, Overloaded)
    assert (error.message, error.field, error.retry_after_s) == ("the queue is full", "f", 1.5)


@pytest.mark.parametrize("method", METHODS)
async def test_a_bug_is_logged_and_not_told(
    channel: grpc.aio.Channel, echo: Echo, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    echo.error = ValueError("secret at 0x7f00")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, method, b"hello")
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "internal error"
    trailers = b"".join(v for _, v in failed.value.trailing_metadata() if isinstance(v, bytes))
    assert b"secret" not in trailers
    (record,) = [r for r in caplog.records if r.name == "batonlm.rpc.errors"]
    assert "secret" in caplog.text
    assert vars(record)["request_id"].encode() in trailers


@pytest.mark.parametrize(("sent", "kept"), [("req-1.a:b", True), ("a b", False)])
async def test_a_bug_is_logged_under_the_callers_request_id(
    channel: grpc.aio.Channel, echo: Echo, caplog: pytest.LogCaptureFixture, sent: str, kept: bool
) -> None:
    echo.error = ValueError()
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(channel)(b"", metadata=grpc.aio.Metadata(("x-request-id", sent)))
    (record,) = [r for r in caplog.records if r.name == "batonlm.rpc.errors"]
    assert (vars(record)["request_id"] == sent) is kept


async def test_an_abort_by_hand_is_left_alone(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, "abort", b"")
    assert (failed.value.code(), failed.value.details()) == (
        grpc.StatusCode.DATA_LOSS,
        "by hand",
    )


async def test_an_unknown_method(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, "no_such_method", b"")
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_cancelling_a_unary_call(channel: grpc.aio.Channel, echo: Echo) -> None:
    running = unary(channel)(b"wait")
    await asyncio.wait_for(echo.waits.wait(), SERVED_WITHIN_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.wait_for(echo.ended.get(), SERVED_WITHIN_S) == "unary"
    assert echo.cancelled == ["unary"]


async def test_cancelling_a_stream_that_waits(channel: grpc.aio.Channel, echo: Echo) -> None:
    running = stream(channel)(b"wait")
    assert await running.read() == b"wait"
    running.cancel()
    assert await asyncio.wait_for(echo.ended.get(), SERVED_WITHIN_S) == "generate"
    assert echo.cancelled == ["generate"]


@pytest.mark.deep
@pytest.mark.parametrize("method", ["generate", "write"])
async def test_cancelling_a_stream_blocked_in_a_write(
    channel: grpc.aio.Channel, echo: Echo, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = stream(channel, method)(b"flood")
    assert await running.read() == b"flood"
    await asyncio.sleep(0.5)
    running.cancel()
    assert await asyncio.wait_for(echo.ended.get(), SERVED_WITHIN_S) == method
    await asyncio.sleep(0.1)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_closing_a_conversation_early(channel: grpc.aio.Channel, echo: Echo) -> None:
    running = talk(channel)()
    await running.write(b"one")
    assert await running.read() == b"one"
    running.cancel()
    assert await asyncio.wait_for(echo.ended.get(), SERVED_WITHIN_S) == "talk"


async def test_a_deadline_ends_the_handler(channel: grpc.aio.Channel, echo: Echo) -> None:
    timeout_s = 0.3
    # One that is over before the handler was reached has nothing to end.
    while not echo.waits.is_set():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await unary(channel)(b"wait", timeout=timeout_s)
        assert from_rpc_error(failed.value).reason.name == "DEADLINE_EXCEEDED"
        timeout_s *= 2
    assert await asyncio.wait_for(echo.ended.get(), SERVED_WITHIN_S) == "unary"
