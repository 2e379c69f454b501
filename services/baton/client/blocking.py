"""The blocking client: a channel to one router, and streams that are iterated."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Unpack, cast

import grpc

from baton.client.answer import Answer
from baton.client.calls import Begin, Calls, Progress
from baton.client.events import event_from_proto
from baton.client.requests import Messages, Options, chat_request, generate_request
from baton.client.tries import DEFAULT, Retries, Tries
from baton.core.errors import BatonError
from baton.core.request.model import ModelDescription
from baton.core.request.request import Event, Tool, ToolChoice
from baton.rpc.convert import model_from_proto
from baton.rpc.errors import from_rpc_error
from baton.rpc.transport import open_blocking_channel
from baton.v1 import inference_pb2 as pb


class Client:
    """Speaks to the router at "host:port". A context manager; threads may share it.

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
        self._calls = Calls(open_blocking_channel, address, api_key, tls, timeout_s, retries)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the streams that are open."""
        self._calls.channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Continues a text or token ids. Nothing is sent before the stream is read."""
        request = generate_request(prompt, model, options)
        return Stream(self._calls.begin("Generate", request), self._calls.tries(timeout_s))

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answers a conversation. Nothing is sent before the stream is read."""
        request = chat_request(messages, model, tools, tool_choice, options)
        return Stream(self._calls.begin("Chat", request), self._calls.tries(timeout_s))

    def models(self, *, timeout_s: float | None = None) -> list[ModelDescription]:
        """The models served. Raises BatonError."""
        tries = self._calls.tries(timeout_s)()
        call = self._calls.begin("ListModels", pb.ListModelsRequest())
        while True:
            try:
                listed = call(tries.left_s(time.monotonic()))
            except grpc.RpcError as error:
                pause_s = tries.pause_s(_meaning(error), time.monotonic(), came=False)
            else:
                return [model_from_proto(model) for model in listed.models]
            time.sleep(pause_s)


class Stream(Progress, Iterator[Event]):
    """One answer as it comes; its end is the end of the iteration, a failure is a BatonError.

    Close it, or leave its `with`, to stop an answer that is not wanted any more.
    """

    def __init__(self, begin: Begin, tries: Callable[[], Tries]) -> None:
        super().__init__(begin, tries)
        self._events = self._run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        event = next(self._events)
        self._gathered.add(event)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()

    @property
    def text(self) -> str:
        """All of the first choice, when it is there."""
        return self.read().text

    def read(self) -> Answer:
        """The whole answer, when it is there; what was iterated over is part of it."""
        for _ in self:
            pass
        return self._gathered.answer()

    def _run(self) -> Generator[Event, None, None]:
        tries, came = self._tries(), False
        while True:
            call = self._begin(tries.left_s(time.monotonic()))
            try:
                for response in call:
                    came = True
                    event = event_from_proto(response.event)
                    if event is not None:
                        yield event
                return
            except grpc.RpcError as error:
                pause_s = tries.pause_s(_meaning(error), time.monotonic(), came=came)
            finally:
                call.cancel()
            time.sleep(pause_s)


def _meaning(error: grpc.RpcError) -> BatonError:
    # The error of a blocking call has the same parts as the asyncio one.
    return from_rpc_error(cast(grpc.aio.AioRpcError, error))
