"""Authentication: API keys, and which public addresses require them.

Credentials that a caller sends are neither logged nor repeated in an answer.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyIndex, parse
from batonlm.core.admission.tenants import ANYONE, OWNER, Tenant
from batonlm.core.errors import InvalidArgument, Unauthenticated
from batonlm.rpc.address import is_loopback, split
from batonlm.rpc.followed_file import FollowedFile
from batonlm.rpc.metrics import API_KEYS, API_KEYS_STALE, REGISTRY, gauge

log = logging.getLogger(__name__)

_SCHEME = "bearer"


class Authenticator(Protocol):
    """Authenticates calls."""

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        """Returns the tenant of a call. authorization: all values of its `authorization` header.
        Raises Unauthenticated."""

    async def run(self) -> None:
        """Follows changes of the keys until cancelled."""


def at_address(tenant: Tenant, host: str) -> Tenant:
    """Gives a tenant without a name its caller's address, so that limits apply per address. Of an
    IPv6 address only the network counts, because a client has all addresses of its network."""
    if tenant.name or not host:
        return tenant
    if ":" in host:
        try:
            known = ipaddress.IPv6Address(host)
        except ValueError:
            return tenant
        # A dual-stack socket reports IPv4 addresses in this form.
        mapped = known.ipv4_mapped
        host = str(mapped or ipaddress.IPv6Network((known.packed[:8] + bytes(8), 64)))
    return replace(tenant, address=host)


class OpenAuthenticator:
    """Requires no key."""

    def __init__(self, *, public: bool = False) -> None:
        """public: other machines can reach the router, so a caller does not count as its owner."""
        self._caller = ANYONE if public else OWNER

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        return self._caller

    async def run(self) -> None:
        return


class KeyAuthenticator:
    """Requires a key from a file, and follows the file's changes while `run` runs.

    An invalid file changes nothing: the keys of the last valid one stay in use.
    """

    def __init__(self, path: str, registry: CollectorRegistry = REGISTRY) -> None:
        """Raises InvalidArgument naming the option `keys` when the file is invalid."""
        self._file = FollowedFile(path, lambda text: KeyIndex(parse(text)), "API keys", "keys")
        if not len(self._file.value):
            log.warning("%s has no keys: nobody can call", path)
        self._remove_gauges = (
            gauge(API_KEYS, lambda: {(): len(self._file.value)}, registry),
            gauge(API_KEYS_STALE, lambda: {(): float(self._file.stale)}, registry),
        )

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        if not authorization:
            raise Unauthenticated("Show an API key: Authorization: Bearer KEY.")
        # A proxy in front may interpret two headers differently.
        scheme, _, key = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != _SCHEME:
            raise Unauthenticated("There must be one key: Authorization: Bearer KEY.")
        tenant = self._file.value.find(key.strip())
        if tenant is None:
            raise Unauthenticated("This API key is not known.")
        return tenant

    async def run(self) -> None:
        try:
            await self._file.run()
        finally:
            for stop in self._remove_gauges:
                stop()

    def look(self) -> None:
        """Reads the file again when it was replaced. Blocks."""
        self._file.look()


def check_exposure(faces: Mapping[str, str], *, keys: bool, allow_anonymous: bool) -> None:
    """Raises InvalidArgument naming the option that would expose the router without authentication.
    faces: "host:port" by option."""
    if keys and allow_anonymous:
        raise InvalidArgument("contradicts keys: say only one of them", field="allow_anonymous")
    for name, host in _public(faces):
        if not (keys or allow_anonymous):
            raise InvalidArgument(
                f"{host} is reached from other machines, so callers have to show keys: give "
                "--keys FILE ('baton keys new' makes one), listen on 127.0.0.1, or say "
                "--allow-anonymous to answer anybody",
                field=name,
            )


def exposure_warnings(
    faces: Mapping[str, str], *, keys: bool, tls: bool, tls_terminated: bool
) -> Iterator[str]:
    """Yields warnings for the operator about a configuration that passed `check_exposure`."""
    if not keys:
        for name, host in _public(faces):
            yield f"{name}: anybody who reaches {host} is answered (allow_anonymous)" + (
                ", over HTTP by an address or a name of allowed_hosts"
                if name == "http_listen"
                else ""
            )
    elif not (tls or tls_terminated):
        for name, host in _public(faces):
            yield (
                f"{name}: keys and texts reach {host} in plain text; give public_tls_cert, or say "
                "tls_terminated if something in front speaks TLS"
            )


def _public(faces: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, address in faces.items():
        host, _ = split(address, name)
        if not is_loopback(host):
            yield name, host
