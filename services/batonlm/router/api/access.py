"""Authentication: API keys, and which public addresses require them.

Credentials that a caller sends are neither logged nor repeated in an answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyBook, KeyIndex, parse
from batonlm.core.admission.tenants import ANYONE, OWNER, Tenant
from batonlm.core.errors import InvalidArgument, Unauthenticated
from batonlm.rpc.address import is_loopback, split
from batonlm.rpc.metrics import API_KEYS, API_KEYS_STALE, REGISTRY, gauge
from batonlm.rpc.tls import LOOK_S, signature

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
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
        self._path = Path(path)
        self._stale = False
        self._seen = signature([self._path])
        try:
            self._index = KeyIndex(_read(self._path))
        except InvalidArgument as error:
            where = f" at {error.field}" if error.field != "keys" else ""
            raise InvalidArgument(f"{path}{where}: {error.message}", field="keys") from None
        if not len(self._index):
            log.warning("%s has no keys: nobody can call", path)
        self._remove_gauges = (
            gauge(API_KEYS, lambda: {(): len(self._index)}, registry),
            gauge(API_KEYS_STALE, lambda: {(): float(self._stale)}, registry),
        )

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        if not authorization:
            raise Unauthenticated("Show an API key: Authorization: Bearer KEY.")
        # A proxy in front may interpret two headers differently.
        scheme, _, key = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != _SCHEME:
            raise Unauthenticated("The Authorization header must be one: Bearer KEY.")
        tenant = self._index.find(key.strip())
        if tenant is None:
            raise Unauthenticated("This API key is not known.")
        return tenant

    async def run(self) -> None:
        """Checks the file every second until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await asyncio.to_thread(self.look)
        finally:
            for stop in self._remove_gauges:
                stop()

    def look(self) -> None:
        """Reads the file again when it was replaced. Blocks."""
        found = signature([self._path])
        if found == self._seen:
            self._stale = False
            return
        try:
            index = KeyIndex(_read(self._path))
        except InvalidArgument as error:
            if not self._stale:
                log.error(
                    "the file of API keys cannot be used, the former keys stay: %s %s",
                    error.field, error.message,
                )  # fmt: skip
            # The file may be half written; the next look reads it again.
            self._stale = True
            return
        self._index, self._seen, self._stale = index, found, False
        log.info("took over %d API keys", len(index))


def _read(path: Path) -> KeyBook:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(error.strerror or "cannot be read", field="keys") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidArgument(f"must have at most {MAX_FILE_BYTES} bytes", field="keys")
    try:
        return parse(raw.decode())
    except UnicodeDecodeError:
        raise InvalidArgument("is not UTF-8", field="keys") from None


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
