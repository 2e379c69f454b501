"""The secret that Baton's own processes show each other on every call, where they have one.

It tells them from other users of the machine where there are no certificates, which say more: which
role calls (`baton.rpc.roles`). It protects nothing from whoever reads the network.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from baton.core.errors import Unauthenticated

if TYPE_CHECKING:
    import grpc

    from baton.rpc.interceptors import Check

VARIABLE = "BATON_PEER_TOKEN"
"""Of the environment: the option `peer_token` of every process."""
KEY = "baton-peer-token"
"""Of the metadata of a call."""
_OPEN = "/grpc.health.v1.Health/"


def checking(token: str) -> Check:
    """Raises Unauthenticated for a call that does not show the token; health needs none."""

    def check(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if method.startswith(_OPEN):
            return
        metadata = context.invocation_metadata() or ()
        if not matches(token, (value for key, value in metadata if key == KEY)):
            raise Unauthenticated("Only Baton's own processes may call this.")

    return check


def matches(token: str, shown: Iterable[str | bytes]) -> bool:
    """Whether the token was shown, and nothing beside it. An empty token matches nothing."""
    values = [value.encode() if isinstance(value, str) else value for value in shown]
    return bool(token) and len(values) == 1 and hmac.compare_digest(values[0], token.encode())
