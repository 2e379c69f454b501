"""JSON documents and failures as ASGI responses.

A failure is OpenAI's error body, `{"error": {message, type, param, code}}`, with one field more:
`retryable` says whether the same request may succeed later. `baton.rpc.errors` describes failures
of requests; `HttpError` is a failure of the HTTP exchange itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Send

from baton.core.errors import BatonError, Unauthenticated
from baton.rpc.errors import http_status, openai_error, retry_after_headers, with_hint

Json = dict[str, Any]
Header = tuple[bytes, bytes]

_encoder = msgspec.json.Encoder()


def encode(document: Json) -> bytes:
    return _encoder.encode(document)


def encode_text(text: str) -> bytes:
    """With its quotes."""
    return _encoder.encode(text)


def encode_list(values: Sequence[int] | Sequence[str]) -> bytes:
    return _encoder.encode(values)


async def send_json(
    send: Send, status: int, document: Json, headers: Sequence[Header] = ()
) -> None:
    await send_parts(send, [encode(document)], headers, status)


async def send_parts(
    send: Send, parts: Sequence[bytes], headers: Sequence[Header] = (), status: int = 200
) -> None:
    """A JSON document that was written in parts, as one response."""
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % sum(map(len, parts))),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


class HttpError(Exception):
    """A failure of the HTTP exchange itself, before any core Request exists."""

    def __init__(self, status: int, message: str, *, code: str):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    def body(self) -> Json:
        error = {"type": "invalid_request_error", "param": None, "code": self.code}
        return {"error": {"message": self.message, **error, "retryable": False}}


def described(error: BatonError | HttpError | HTTPException) -> tuple[int, Json, list[Header]]:
    """Status, body and extra headers."""
    match error:
        case Unauthenticated():
            # Its body was not read, or not to the end.
            headers = [(b"www-authenticate", b"Bearer"), (b"connection", b"close")]
            return http_status(error), openai_error(error), headers
        case BatonError():
            return http_status(error), openai_error(error), _retry_headers(error)
        case HttpError():
            return error.status, error.body(), [(b"connection", b"close")]
        case _:
            routing = _routing_error(error)
            allow = (error.headers or {}).get("Allow", "")
            return routing.status, routing.body(), [(b"allow", allow.encode())] if allow else []


def _routing_error(error: HTTPException) -> HttpError:
    if error.status_code == 405:
        return HttpError(405, "this method is not allowed here", code="method_not_allowed")
    return HttpError(404, "there is no such route", code="not_found")


def _retry_headers(error: BatonError) -> list[Header]:
    headers = retry_after_headers(with_hint(error))
    return [(name.encode(), value.encode()) for name, value in headers.items()]
