"""Authorization between Baton's processes, and of a router's clients.

Inside Baton a certificate names a role as a DNS name, `ROLE.baton.internal`, not a host: workers
come and go with any address. gRPC checks the server's role for the caller; the server checks the
caller's role here, for each call. Without certificates, a shared secret distinguishes Baton's
processes from other users of the machine; it gives no protection against eavesdropping. Clients of
a router send an API key.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from batonlm.core.errors import InvalidArgument, Unauthenticated
from batonlm.rpc.address import is_loopback

if TYPE_CHECKING:
    import grpc

    from batonlm.rpc.errors import Check

ROLE_DOMAIN = "baton.internal"
DOCTOR = "doctor"
"""The role of `baton doctor kv`, which does a handshake with a worker and fetches only the KV of a
probe."""

ROLES = frozenset({"router", "tokenizer", "prefill", "decode", "detokenizer", "encode", DOCTOR})

CALLERS: dict[str, frozenset[str]] = {
    "baton.v1.Tokenizer": frozenset({"router"}),
    "baton.v1.Prefill": frozenset({"router"}),
    "baton.v1.Decode": frozenset({"router"}),
    "baton.v1.Detokenizer": frozenset({"router"}),
    "baton.v1.Encode": frozenset({"router"}),
    "baton.v1.Handover": frozenset({"prefill", "decode", DOCTOR}),
    "baton.v1.Worker": frozenset({"router", DOCTOR}),
    "baton.v1.Adapters": frozenset({"router"}),
    "grpc.health.v1.Health": ROLES,
    "grpc.reflection.v1alpha.ServerReflection": ROLES,
}
"""The roles that may call each service. Calls of any other service are refused."""

_PEER_NAMES = "peer_dns"


def server_name(role: str) -> str:
    """The DNS name in a certificate of this role."""
    return f"{role}.{ROLE_DOMAIN}"


def check_caller(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raises Unauthenticated when the peer of a TLS connection may not call "/service/Method"."""
    names = context.auth_context().get(_PEER_NAMES, ())
    allowed = CALLERS.get(method.removeprefix("/").rpartition("/")[0], frozenset())
    if not any(server_name(role).encode() in names for role in allowed):
        raise Unauthenticated("This certificate's role may not call this.")


PEER_TOKEN_VARIABLE = "BATON_PEER_TOKEN"
"""Environment variable of the option `peer_token` of every process."""
PEER_TOKEN_KEY = "baton-peer-token"
"""Metadata key of the token."""
_OPEN = "/grpc.health.v1.Health/"


def check_token(token: str) -> Check:
    """A check that raises Unauthenticated for a call without the token. Health needs none."""

    def check(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if method.startswith(_OPEN):
            return
        metadata = context.invocation_metadata() or ()
        if not token_matches(token, (value for key, value in metadata if key == PEER_TOKEN_KEY)):
            raise Unauthenticated("Only Baton's own processes may call this.")

    return check


def token_matches(token: str, shown: Iterable[str | bytes]) -> bool:
    """Whether `shown` is exactly the token, once. An empty token matches nothing."""
    values = [value.encode() if isinstance(value, str) else value for value in shown]
    return bool(token) and len(values) == 1 and hmac.compare_digest(values[0], token.encode())


Metadata = tuple[tuple[str, str | bytes], ...]


def api_key_metadata(key: str) -> Metadata:
    """Metadata for every call of a client; empty for the key ""."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def check_api_key(key: str, host: str, *, tls: bool) -> None:
    """Raises InvalidArgument for a malformed key, and for one that would be sent to another machine
    in plain text."""
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidArgument("is no API key", field="api_key")
    if key and not tls and not is_loopback(host):
        raise InvalidArgument("would go to another machine in plain text: use TLS", field="api_key")
