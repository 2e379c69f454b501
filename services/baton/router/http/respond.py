"""Sending a JSON document as one ASGI response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Send

Json = dict[str, Any]
Header = tuple[bytes, bytes]

_encoder = msgspec.json.Encoder()


def encode(document: Json) -> bytes:
    return _encoder.encode(document)


def encode_text(text: str) -> bytes:
    """With its quotes."""
    return _encoder.encode(text)


async def send_json(
    send: Send, status: int, document: Json, headers: Sequence[Header] = ()
) -> None:
    body = encode(document)
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
