"""The asyncio client: a channel to one router, and streams that are iterated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Unpack

import grpc

from baton.client.answer import Answer
from baton.client.calls import Begin, Calls, Progress
from baton.client.events import event_from_proto
from baton.client.requests import Messages, Options, chat_request, generate_request
from baton.client.tries import DEFAULT, Retries, Tries
from baton.core.request.model import ModelDescription
from baton.core.request.request import Event, Tool, ToolChoice
from baton.rpc.convert import model_from_proto
from baton.rpc.errors import from_rpc_error
from baton.rpc.transport import open_client_channel
from baton.v1 import inference_pb2 as pb


class AsyncClient:
    """Speaks to the router at "host:port", on one event loop. A context manager.

    tls: True trusts the usual CAs, bytes are the PEM of the CA to trust. timeout_s: for a call that
    names none. Raises InvalidArgument naming the argument.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: bool | bytes = False,
        timeout_s: float | None = None,
        retries: Retries = DEFAULT,
    ) -> None:
        self._calls = Calls(open_client_channel, address, api_key, tls, timeout_s, retries)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the streams that are open."""
        await self._calls.channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Continues a text or token ids. Nothing is sent before the stream is read."""
        request = generate_request(prompt, model, options)
        return AsyncStream(self._calls.begin("Generate", request), self._calls.tries(timeout_s))

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Answers a conversation. Nothing is sent before the stream is read."""
        request = chat_request(messages, model, tools, tool_choice, options)
        return AsyncStream(self._calls.begin("Chat", request), self._calls.tries(timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> list[ModelDescription]:
        """The models served. Raises BatonError."""
        tries = self._calls.tries(timeout_s)()
        call = self._calls.begin("ListModels", pb.ListModelsRequest())
        while True:
            try:
                listed = await call(tries.left_s(time.monotonic()))
            except grpc.aio.AioRpcError as error:
                pause_s = tries.pause_s(from_rpc_error(error), time.monotonic(), came=False)
            else:
                return [model_from_proto(model) for model in listed.models]
            await asyncio.sleep(pause_s)


class AsyncStream(Progress, AsyncIterator[Event]):
    """One answer as it comes; its end is the end of the iteration, a failure is a BatonError.

    Close it, or leave its `with`, to stop an answer that is not wanted any more.
    """

    def __init__(self, begin: Begin, tries: Callable[[], Tries]) -> None:
        super().__init__(begin, tries)
        self._events = self._run()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self._gathered.add(event)
        return event

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._events.aclose()

    async def text(self) -> str:
        """All of the first choice, when it is there."""
        return (await self.read()).text

    async def read(self) -> Answer:
        """The whole answer, when it is there; what was iterated over is part of it."""
        async for _ in self:
            pass
        return self._gathered.answer()

    async def _run(self) -> AsyncGenerator[Event, None]:
        tries, came = self._tries(), False
        while True:
            call = self._begin(tries.left_s(time.monotonic()))
            try:
                async for response in call:
                    came = True
                    event = event_from_proto(response.event)
                    if event is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                pause_s = tries.pause_s(from_rpc_error(error), time.monotonic(), came=came)
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)
