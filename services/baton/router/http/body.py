"""Receiving a JSON body: its declared type and a bound on its size.

A refused body is still read, up to a bound: closing a socket with unread data resets it, and the
client would see a broken connection in place of the reason. A body that comes too slowly ends its
connection (`protocol`).
"""

from __future__ import annotations

from starlette.types import Receive, Scope

from baton.router.http.errors import HttpError

MAX_BODY_BYTES = 1 << 20
MAX_DISCARDED_BYTES = 8 << 20


class ClientGone(Exception):
    """The client left before its request was complete: there is no one to answer."""


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises HttpError 413 or 415, or ClientGone."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    refusal = _refusal(headers)
    # A client that waits for "100 Continue" has not sent the body; do not invite it.
    if refusal is not None and headers.get(b"expect", b"").lower() == b"100-continue":
        raise refusal
    body = await _receive_all(receive, keep=refusal is None)
    if refusal is not None:
        raise refusal
    return body


async def discard_body(scope: Scope, receive: Receive) -> None:
    """Takes the body of a request that is refused anyway. Raises ClientGone."""
    if dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue":
        return
    await _receive_all(receive, keep=False)


async def _receive_all(receive: Receive, *, keep: bool) -> bytes:
    """The body, or nothing when it is not to be kept; raises HttpError 413 after reading on."""
    body = bytearray()
    received, more = 0, True
    while more and received <= MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        received += len(part)
        if keep and received <= MAX_BODY_BYTES:
            body += part
        more = message.get("more_body", False)
    if keep and received > MAX_BODY_BYTES:
        raise _too_large()
    return bytes(body)


def _refusal(headers: dict[bytes, bytes]) -> HttpError | None:
    """What the headers alone rule out. No declared type passes for JSON, a wrong one does not.

    A page of another site may make a browser send a body of no type without asking this router
    first. So what comes from a browser has to say that it is JSON: that it sends only with the
    router's leave (CORS), which is never given.
    """
    undeclared = b"" if _from_a_page(headers) else b"application/json"
    kind = headers.get(b"content-type", undeclared).split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        return HttpError(415, "Content-Type must be application/json", code="unsupported_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        return HttpError(415, "the body must not be compressed", code="unsupported_encoding")
    if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
        return _too_large()
    return None


def _from_a_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser sends it, for a page of whatever site."""
    return b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none"


def _too_large() -> HttpError:
    return HttpError(413, f"the body must have at most {MAX_BODY_BYTES} bytes", code="too_large")
