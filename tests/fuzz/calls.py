"""Sends serialized messages, whatever is in them, and reads what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz import oracle
from tests.fuzz.rpcs import Rpc

OURS_S = 5.0
"""Our deadline for whatever is made up. Only calls that wait for what never comes reach it."""

ENOUGH = 32
"""Responses after which we leave a stream; one that never ends (a Watch) after the first."""


@dataclass(frozen=True)
class Outcome:
    code: grpc.StatusCode
    text: str
    responses: tuple[bytes, ...]
    trailers: tuple[tuple[str, str | bytes], ...]


def send(
    channel: grpc.Channel, rpc: Rpc, messages: Sequence[bytes], timeout_s: float = OURS_S
) -> Outcome:
    """All messages, then the end of our half; reads the answer's end, or ENOUGH of it."""
    call: Any
    if len(messages) == 1 and not rpc.sends_many:
        one: Any = channel.unary_stream(rpc.path)
        call = one(messages[0], timeout=timeout_s)
    else:
        many: Any = channel.stream_stream(rpc.path)
        call = many(iter(messages), timeout=timeout_s)
    responses: list[bytes] = []
    enough = 1 if rpc.method == "Watch" else ENOUGH
    try:
        for response in call:
            responses.append(response)
            if len(responses) == enough:
                call.cancel()
                return Outcome(grpc.StatusCode.CANCELLED, "", tuple(responses), ())
    except grpc.RpcError:
        pass
    trailers = tuple((key, value) for key, value in call.trailing_metadata() or ())
    return Outcome(call.code(), call.details() or "", tuple(responses), trailers)


def check(rpc: Rpc, outcome: Outcome) -> None:
    oracle.check_status(outcome.code, outcome.text)
    for _, value in outcome.trailers:
        oracle.check_text(value if isinstance(value, str) else value.decode("latin-1"))
    for response in outcome.responses:
        oracle.check_response(GetMessageClass(rpc.response).FromString(response))
