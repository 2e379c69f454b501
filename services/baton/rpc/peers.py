"""Who may call whom, and how a caller shows who it is.

Inside Baton a certificate names its role as a DNS name, `ROLE.baton.internal`, and not its host:
workers come and go with any address. The caller has gRPC check the role that it means to reach; the
server checks the caller's role here, call by call. Where there are no certificates, a shared secret
tells Baton's processes from other users of the machine; it protects nothing from readers of the
network. Clients of a router show an API key.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from baton.core.errors import InvalidArgument, Unauthenticated
from baton.rpc.address import is_loopback

if TYPE_CHECKING:
    import grpc

    from baton.rpc.errors import Check

ROLE_DOMAIN = "baton.internal"
DOCTOR = "doctor"
"""`baton doctor kv`: meets a worker, and takes no KV but a probe's."""

ROLES = frozenset({"router", "tokenizer", "prefill", "decode", "detokenizer", DOCTOR})

CALLERS: dict[str, frozenset[str]] = {
    "baton.v1.Tokenizer": frozenset({"router"}),
    "baton.v1.Prefill": frozenset({"router"}),
    "baton.v1.Decode": frozenset({"router"}),
    "baton.v1.Detokenizer": frozenset({"router"}),
    "baton.v1.Handover": frozenset({"decode", DOCTOR}),
    "baton.v1.Worker": frozenset({"router", DOCTOR}),
    "grpc.health.v1.Health": ROLES,
    "grpc.reflection.v1alpha.ServerReflection": ROLES,
}
"""A service that is not here may be called by nobody."""

_PEER_NAMES = "peer_dns"


def server_name(role: str) -> str:
    """What a certificate of this role has among its DNS names."""
    return f"{role}.{ROLE_DOMAIN}"


def check_caller(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raises Unauthenticated when the peer of a TLS connection may not call "/service/Method"."""
    names = context.auth_context().get(_PEER_NAMES, ())
    allowed = CALLERS.get(method.removeprefix("/").rpartition("/")[0], frozenset())
    if not any(server_name(role).encode() in names for role in allowed):
        raise Unauthenticated("This certificate's role may not call this.")


PEER_TOKEN_VARIABLE = "BATON_PEER_TOKEN"
"""Of the environment: the option `peer_token` of every process."""
PEER_TOKEN_KEY = "baton-peer-token"
"""Of the metadata of a call."""
_OPEN = "/grpc.health.v1.Health/"


def check_token(token: str) -> Check:
    """Raises Unauthenticated for a call that does not show the token; health needs none."""

    def check(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if method.startswith(_OPEN):
            return
        metadata = context.invocation_metadata() or ()
        if not token_matches(token, (value for key, value in metadata if key == PEER_TOKEN_KEY)):
            raise Unauthenticated("Only Baton's own processes may call this.")

    return check


def token_matches(token: str, shown: Iterable[str | bytes]) -> bool:
    """Whether the token was shown, and nothing beside it. An empty token matches nothing."""
    values = [value.encode() if isinstance(value, str) else value for value in shown]
    return bool(token) and len(values) == 1 and hmac.compare_digest(values[0], token.encode())


Metadata = tuple[tuple[str, str | bytes], ...]


def api_key_metadata(key: str) -> Metadata:
    """Of every call; key: "" shows none."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def check_api_key(key: str, host: str, *, tls: bool) -> None:
    """Raises InvalidArgument for what is no key, and for one that would go to another machine in
    plain text."""
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidArgument("is no API key", field="api_key")
    if key and not tls and not is_loopback(host):
        raise InvalidArgument("would go to another machine in plain text: use TLS", field="api_key")
