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
