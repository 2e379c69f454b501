"""JSON documents and errors as ASGI responses.

An error is OpenAI's error body, `{"error": {message, type, param, code}}`, with one additional
field: `retryable` says whether the same request may succeed later. `batonlm.rpc.errors` describes
failures of requests; `HttpError` is a failure of the HTTP exchange itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

from batonlm.core.errors import BatonError, Unauthenticated
from batonlm.rpc.errors import http_status, openai_error, retry_after_headers, with_hint

Json = dict[str, Any]
Header = tuple[bytes, bytes]

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def utc_time(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def json_response(document: Json) -> Response:
    return Response(encode(document), media_type="application/json")


async def send_json(
    send: Send, status: int, document: Json, headers: Sequence[Header] = ()
) -> None:
    await send_parts(send, [encode(document)], headers, status)


async def send_parts(
    send: Send,
    parts: Sequence[bytes],
    headers: Sequence[Header] = (),
    status: int = 200,
    kind: bytes = b"application/json",
) -> None:
    """Sends a document that was written in parts as one response. kind: its content type."""
    head = [
        (b"content-type", kind),
        (b"content-length", b"%d" % sum(map(len, parts))),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


CLOSES: Sequence[Header] = ((b"connection", b"close"),)


class HttpError(Exception):
    """A failure of the HTTP exchange itself, before a core Request exists."""

    def __init__(
        self, status: int, message: str, *, code: str, headers: Sequence[Header] | None = None
    ):
        """headers: None closes the connection, whose request body was not read to its end."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = CLOSES if headers is None else headers

    def body(self) -> Json:
        error = {"type": "invalid_request_error", "param": None, "code": self.code}
        return {"error": {"message": self.message, **error, "retryable": False}}


Failure = BatonError | HttpError


def error_document(error: BatonError | HttpError) -> Json:
    return error.body() if isinstance(error, HttpError) else openai_error(error)


def error_status(error: Failure) -> int:
    return error.status if isinstance(error, HttpError) else http_status(error)


def error_headers(error: Failure, request_id: str) -> list[Header]:
    headers: list[Header] = [(b"x-request-id", request_id.encode())]
    if isinstance(error, Unauthenticated):
        headers += [*CLOSES, (b"www-authenticate", b"Bearer")]
    if isinstance(error, HttpError):
        headers += error.headers
    else:
        hints = retry_after_headers(with_hint(error))
        headers += [(name.encode(), value.encode()) for name, value in hints.items()]
    return headers


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How an API writes the events of a stream, and failures."""

    content_type: bytes
    """Of a stream."""
    frame: Callable[[Json], bytes]
    """Returns the bytes of one event."""
    end: bytes
    """What ends a stream that did not fail."""
    keep_alive: bytes
    """What is sent while a stream has nothing new; empty: nothing."""
    failure: Callable[[Failure, str], Json]
    """Returns the document of a failure of the request with this id, if that is known. In a stream
    it is the last event."""
    id_header: bytes = b""
    """The name under which the API's clients look for the request's id, beside x-request-id."""
    resumable: bool = False
    """Whether the events of a stream may have ids."""

    def id_headers(self, request_id: str) -> list[Header]:
        return [(self.id_header, request_id.encode())] if self.id_header else []


OPENAI = WireFormat(
    content_type=b"text/event-stream; charset=utf-8",
    frame=lambda document: b"data: %b\n\n" % encode(document),
    end=b"data: [DONE]\n\n",
    keep_alive=b": keep-alive\n\n",
    failure=lambda error, _: error_document(error),
    resumable=True,
)


async def send_error(
    send: Send, error: Failure, request_id: str, wire: WireFormat = OPENAI
) -> None:
    headers = error_headers(error, request_id) + wire.id_headers(request_id)
    await send_json(send, error_status(error), wire.failure(error, request_id), headers)
