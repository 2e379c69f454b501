"""Addresses: reads `host:port`, explains why a port cannot be opened, and checks Host headers."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batonlm.core.errors import InvalidArgument


class PortInUse(InvalidArgument):
    """Another process listens there already."""


def split(address: str, field: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises InvalidArgument naming the field."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(
            f"{address!r} is not host:port with a port from 0 to 65535", field=field
        )
    return host, int(port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address. localhost is the only name that counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_listen(address: str, field: str) -> None:
    """Raises PortInUse or InvalidArgument when a plain socket cannot listen there."""
    with _bound(address, field) as probe:
        try:
            probe.listen(1)
        except OSError as error:
            raise refusal(error, address, field) from None


@contextmanager
def claimed(address: str, field: str, *, shared: bool = False) -> Iterator[tuple[str, str]]:
    """Keeps a port for servers of this user that set SO_REUSEPORT: they bind beside the claim, at
    any time. The claim itself accepts no connections.

    Nobody else is given the port meanwhile, unless connections of an earlier server of it are in
    TIME_WAIT now: the system then lets others bind beside a socket that does not listen.

    shared: the port may be claimed already by a process of this user. Yields the address and the
    one that it means on this machine, both with the real port where 0 was given. Raises PortInUse
    or InvalidArgument naming the field.
    """
    with _bound(address, field, shared=shared) as claim:
        # Only now, so that a port in use was refused.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        host, port = claim.getsockname()[:2]
        yield join(split(address, field)[0], port), join(host, port)


def _bound(address: str, field: str, *, shared: bool = False) -> socket.socket:
    """A socket that is bound there and does not listen."""
    host, port = split(address, field)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]

        def bind(*options: int) -> socket.socket:
            bound = socket.socket(family, kind, protocol)
            try:
                for option in options:
                    bound.setsockopt(socket.SOL_SOCKET, option, 1)
                bound.bind(target)
            except BaseException:
                bound.close()
                raise
            return bound

        own = (socket.SO_REUSEPORT,) if shared else ()
        try:
            return bind(*own)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # SO_REUSEADDR skips TIME_WAIT, but also sockets with this option that do not listen
            # yet. Hence first without it.
            return bind(*own, socket.SO_REUSEADDR)
    except OSError as error:
        raise refusal(error, address, field) from None


def refusal(error: OSError, address: str, field: str) -> InvalidArgument:
    """The InvalidArgument for a failed bind or name look-up."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"{address} is already in use; stop the other process or choose another port",
            field=field,
        )
    if error.errno == errno.EACCES:
        return InvalidArgument(f"not permitted to listen on {address}", field=field)
    return InvalidArgument(f"{address} is no address of this machine", field=field)


ANY = "*"
"""The entry of allowed_hosts that allows every name."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_OWN = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """The Host headers that one listening address accepts."""

    def __init__(self, listen: str, named: Sequence[str] = ()) -> None:
        """listen: "host:port". named: names and addresses without ports; "*.name" stands for
        everything below a name, "*" for everything. Raises InvalidArgument naming allowed_hosts."""
        host, _ = split(listen, "http_listen")
        self._any = ANY in named
        self._addresses = not is_loopback(host)
        entries = [_entry(name) for name in named if name != ANY]
        self._names = {*_OWN, *(entry for entry in entries if not entry.startswith("*"))}
        self._suffixes = (".localhost", *(e[1:] for e in entries if e.startswith("*")))
        if self._addresses:
            self._names.add(host.lower())

    def allow(self, hosts: Sequence[bytes]) -> bool:
        """Whether all are allowed. hosts: every Host header of one request; none is refused."""
        return bool(hosts) and (self._any or all(map(self._allows, hosts)))

    def _allows(self, header: bytes) -> bool:
        found = _HOST.fullmatch(header.decode("latin-1").lower())
        if found is None:
            return False
        host = found[1].strip("[]").removesuffix(".")
        if host in self._names or host.endswith(self._suffixes):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self._addresses or address.is_loopback or str(address) in self._names


def _entry(name: str) -> str:
    """The entry in the form of a Host header. Raises InvalidArgument naming allowed_hosts."""
    entry = name.strip().lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(entry.strip("[]")))
    except ValueError:
        if not _NAME.fullmatch(entry):
            raise InvalidArgument(
                f"{name[:80]!r} must be a name or an address without a port, such as "
                "baton.example.com, *.example.com or 192.0.2.7; * allows every name",
                field="allowed_hosts",
            ) from None
        return entry
