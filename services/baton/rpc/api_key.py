"""How a client shows an API key over gRPC, and when it must not."""

from __future__ import annotations

from baton.core.errors import InvalidArgument
from baton.rpc.address import is_loopback

Metadata = tuple[tuple[str, str | bytes], ...]


def metadata(key: str) -> Metadata:
    """Of every call; key: "" shows none."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def check(key: str, host: str, *, tls: bool) -> None:
    """Raises InvalidArgument for what is no key, and for one that would go to another machine in
    plain text."""
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidArgument("is no API key", field="api_key")
    if key and not tls and not is_loopback(host):
        raise InvalidArgument("would go to another machine in plain text: use TLS", field="api_key")
