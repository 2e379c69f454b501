"""What an answer to bad input may be: a client's error in our own words, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
from google.protobuf.message import Message

from batonlm.v1 import types_pb2

_Code = grpc.StatusCode
CLIENT_CODES = {
    _Code.OK,
    _Code.INVALID_ARGUMENT,
    _Code.NOT_FOUND,
    _Code.UNIMPLEMENTED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.FAILED_PRECONDITION,
    _Code.UNAUTHENTICATED,
    _Code.PERMISSION_DENIED,
    _Code.OUT_OF_RANGE,
    # Ours: we leave, or our deadline or that of an attempt passes.
    _Code.CANCELLED,
    _Code.DEADLINE_EXCEEDED,
}
ELSEWHERE = re.compile(r"this address now belongs to (another process|a newer (pre|de)\w+ worker)")
"""UNAVAILABLE is right for one mistake of a caller: it looks for a process that is no more."""

REASONS = {
    types_pb2.ERROR_REASON_INVALID_ARGUMENT,
    types_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
    types_pb2.ERROR_REASON_MODEL_NOT_FOUND,
    types_pb2.ERROR_REASON_NOT_FOUND,
    types_pb2.ERROR_REASON_OVERLOADED,
    types_pb2.ERROR_REASON_INCOMPATIBLE,
    types_pb2.ERROR_REASON_UNIMPLEMENTED,
    types_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
    types_pb2.ERROR_REASON_CANCELLED,
    # In a stream that goes on: the hand-over named there cannot be had.
    types_pb2.ERROR_REASON_HANDOVER_FAILED,
    types_pb2.ERROR_REASON_UNAVAILABLE,
}

_ADDRESS = re.compile(r"0x[0-9a-f]{4}")
_INTERNALS = re.compile(
    r"Traceback|Exception|<class|\bobject at\b|\.py\b|\.cc\b|site-packages"
    r"|(^|[\s'\"])/(tmp|work|usr|home|proc|root|etc|var)/|\b[A-Z][a-z]+Error\b"
    r"|\bNoneType\b|google\.protobuf|batonlm\.(core|rpc|router|decode|prefill|kv|engine|v1)\b"
)


def check_status(code: grpc.StatusCode, text: str) -> None:
    if code is _Code.UNAVAILABLE:
        assert ELSEWHERE.fullmatch(text), (code, text)
    else:
        assert code in CLIENT_CODES, (code, text)
    check_text(text)


def check_text(text: str) -> None:
    """Nothing of our insides in what a client reads."""
    assert not _ADDRESS.search(text), text
    check_transport(text)


def check_transport(text: str) -> None:
    """As `check_text`; but gRPC's transport may name, in hexadecimal, a number that it was sent."""
    assert not _INTERNALS.search(text), text


def check_response(response: Message) -> None:
    """The errors inside an answer, wherever they are."""
    for error in _errors(response):
        assert error.reason in REASONS, error
        check_text(error.message)


def _errors(message: Message) -> Iterator[types_pb2.Error]:
    if isinstance(message, types_pb2.Error):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            yield from _errors(part)
