"""A server that closes amid streams: each ends with an error that says to try again, in time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.errors import Internal, Unavailable
from tests.services.router_http.scripted import ANYONE, Scripted, http_app

BODY = {"prompt": "abc", "max_tokens": 100, "stream": True}
PATIENCE_S = 120.0


class Exchange:
    """One request as an ASGI server has it. `gone`: the client has left. `stuck`: set, nothing
    more is taken of what is sent."""

    def __init__(self, frontend: Scripted, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.stuck = asyncio.Event()
        self._bodies = [json.dumps(body).encode()]
        self._app = http_app(frontend, CollectorRegistry(), ANYONE)

    async def run(self) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.stuck.is_set():
            await asyncio.get_running_loop().create_future()
        self.sent.append(message)

    @property
    def events(self) -> list[str]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


async def begun(body: dict[str, Any]) -> tuple[Scripted, Exchange, asyncio.Task[None]]:
    """An answer that has begun, as far as it goes before `hold`."""
    frontend = Scripted(hold=True)
    exchange = Exchange(frontend, body)
    task = asyncio.create_task(exchange.run())
    async with asyncio.timeout(PATIENCE_S):
        while not any('"text":"0"' in event for event in exchange.events):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return frontend, exchange, task


async def cut(task: asyncio.Task[None]) -> None:
    task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_stream_that_the_server_cuts_says_to_try_again() -> None:
    frontend, exchange, task = await begun(BODY)
    await cut(task)
    error = json.loads(exchange.events[-1])["error"]
    assert (error["code"], error["retryable"]) == ("unavailable", True)
    assert exchange.ended and frontend.open_streams == 0


async def test_a_client_that_takes_nothing_holds_no_close_up() -> None:
    frontend, exchange, task = await begun(BODY)
    exchange.stuck.set()
    await cut(task)
    assert not exchange.ended and frontend.open_streams == 0


async def test_a_client_that_has_left_is_told_nothing() -> None:
    frontend, exchange, task = await begun(BODY)
    told = len(exchange.events)
    exchange.gone.set()
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert len(exchange.events) == told
    assert not exchange.ended and frontend.open_streams == 0


@pytest.mark.parametrize(
    ("failure", "retryable"),
    [(Unavailable("no worker is ready"), True), (Internal("?"), False), (ValueError("x"), False)],
)
async def test_a_failure_says_whether_to_try_again(failure: Exception, retryable: bool) -> None:
    exchange = Exchange(Scripted(failure=failure), BODY)
    async with asyncio.timeout(PATIENCE_S):
        await exchange.run()
    error = json.loads(exchange.events[-1])["error"]
    assert error["retryable"] is retryable and exchange.ended
    assert "[DONE]" not in exchange.events
