"""What a call sent, checked to be a message at all; knows no service and no message.

gRPC's server answers bytes that it cannot decode with UNKNOWN and the text of the exception, and
a call that asks without a message never. So the decoders given to it never raise, and the one
message of a call is read here, where there may be none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError
from grpc import aio

from baton.core.errors import InvalidArgument

Decoder = Callable[[bytes], Any]

_UNDECODABLE = object()


def tolerant(decoder: Decoder | None) -> Decoder | None:
    """The decoder, with a mark in place of DecodeError; `one` and `Each` look for it."""
    if decoder is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return decoder(data)
        except DecodeError:
            return _UNDECODABLE

    return decode


async def one(_: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> Any:
    """The message of a call that sends one. Raises InvalidArgument."""
    message = await context.read()
    if message is aio.EOF:
        raise InvalidArgument("the call has no message")
    return _checked(message)


async def each(messages: AsyncIterator[Any], _: aio.ServicerContext[Any, Any]) -> Each:
    """The messages of a call that sends many."""
    return Each(messages)


class Each:
    """Iterates over messages as they come. Raises InvalidArgument at one that is none."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        # gRPC's iterator complains when it is made and then never asked.
        self._open: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Each:
        return self

    async def __anext__(self) -> Any:
        if self._open is None:
            self._open = aiter(self._messages)
        return _checked(await anext(self._open))


def _checked(message: Any) -> Any:
    if message is _UNDECODABLE:
        raise InvalidArgument("the message is not one of the type that this call takes")
    return message
