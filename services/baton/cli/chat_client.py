"""One conversation with a router over gRPC, turn by turn; knows neither terminals nor flags."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from baton.cli.access import Access
from baton.core.errors import BatonError, Unavailable
from baton.rpc.address import split
from baton.rpc.errors import from_rpc_error
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, tokenizer_pb2, types_pb2

CONNECT_S = 5.0


@dataclass(slots=True)
class Turn:
    """One answer. first_s and total_s: seconds from sending to the first text and to the end.

    finished is false for an answer that was stopped.
    """

    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    finished: bool = False

    @property
    def tokens_per_s(self) -> float:
        """After the first token: what the reader feels."""
        after = self.total_s - self.first_s
        return (self.tokens - 1) / after if after > 0 and self.tokens > 1 else 0.0


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how the next answer is made."""

    options: pb.GenerationOptions
    model: str = ""
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def request(self, prompt: str) -> pb.ChatRequest:
        messages = [("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            messages += [("user", asked), ("assistant", answered)]
        messages.append(("user", prompt))
        return pb.ChatRequest(
            model=self.model,
            messages=[
                tokenizer_pb2.ChatMessage(role=role, content=content) for role, content in messages
            ],
            options=self.options,
        )


def options(
    *, temperature: float | None = None, seed: int | None = None, max_tokens: int | None = None
) -> pb.GenerationOptions:
    """None leaves a value to the server."""
    return pb.GenerationOptions(
        sampling=types_pb2.SamplingParams(temperature=temperature, seed=seed),
        stop=types_pb2.StopParams(max_tokens=max_tokens),
    )


class ChatClient:
    """A channel to one router; a context manager."""

    def __init__(self, access: Access) -> None:
        """Raises InvalidArgument for what is no address, Unavailable when nothing listens."""
        host, port = split(access.address, "grpc")
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            raise Unavailable(
                f"nothing listens on {access.address}: start it with 'baton up'"
            ) from None
        self._metadata = access.metadata
        self._channel = access.channel()
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def ask(self, conversation: Conversation, prompt: str, show: Callable[[str], None]) -> Turn:
        """The whole answer; `show` gets each piece of text as it comes.

        Ctrl-C stops the answer and returns what there is. Any other end raises BatonError. The
        conversation is not changed.
        """
        turn = Turn()
        began = time.monotonic()
        call = self._stub.Chat(conversation.request(prompt), metadata=self._metadata)
        try:
            with suppress(KeyboardInterrupt):
                for response in call:
                    event = response.event
                    if event.HasField("delta"):
                        turn.first_s = turn.first_s or time.monotonic() - began
                        turn.text += event.delta.text
                        show(event.delta.text)
                    elif event.HasField("finished"):
                        turn.tokens = event.finished.completion_tokens
                        turn.finished = True
        except grpc.RpcError as error:
            raise _meaning(error) from error
        finally:
            call.cancel()
        turn.total_s = time.monotonic() - began
        return turn


def _meaning(error: grpc.RpcError) -> BatonError:
    # The error of a blocking call has the same parts as the asyncio one.
    return from_rpc_error(cast(grpc.aio.AioRpcError, error))
