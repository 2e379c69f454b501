"""Failures as OpenAI's error bodies: `{"error": {message, type, param, code}}` with a status.

One field more than OpenAI's says whether the same request may do better: `retryable`.

`baton.rpc.errors` knows core's failures; here are those that only HTTP has. Every text is ours.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException

from baton.core.errors import BatonError, Unauthenticated
from baton.router.api.http.respond import Header, Json
from baton.rpc.errors import http_status, openai_error, retry_after_headers, with_hint


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
