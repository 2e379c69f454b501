"""Who may call which service inside Baton, by the name in the caller's certificate.

A certificate names its role as a DNS name, `ROLE.baton.internal`, and not its host: workers come
and go with any address. The caller has gRPC check the name of the role that it means to reach; the
one who is called checks the caller's role here, call by call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.core.errors import Unauthenticated

if TYPE_CHECKING:
    import grpc

DOMAIN = "baton.internal"
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
    return f"{role}.{DOMAIN}"


def check_caller(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raises Unauthenticated when the peer of a TLS connection may not call "/service/Method"."""
    names = context.auth_context().get(_PEER_NAMES, ())
    allowed = CALLERS.get(method.removeprefix("/").rpartition("/")[0], frozenset())
    if not any(server_name(role).encode() in names for role in allowed):
        raise Unauthenticated("This certificate's role may not call this.")
