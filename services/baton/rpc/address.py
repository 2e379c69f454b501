"""Reads `host:port` and says why a place cannot be listened on; keeps nothing open."""

from __future__ import annotations

import errno
import ipaddress
import socket

from baton.core.errors import InvalidArgument


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
    """Whether a host is this machine, whatever network it is on. Of names only localhost is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(address: str, field: str) -> None:
    """Raises PortInUse or InvalidArgument when a plain socket cannot listen there."""
    host, port = split(address, field)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Skips TIME_WAIT only: a port that somebody listens on is still refused.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        raise refusal(error, address, field) from None


def refusal(error: OSError, address: str, field: str) -> InvalidArgument:
    """A failed bind or look-up, in words."""
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"{address} is already in use; stop the other process or choose another port",
            field=field,
        )
    if error.errno == errno.EACCES:
        return InvalidArgument(f"not permitted to listen on {address}", field=field)
    return InvalidArgument(f"{address} is no address of this machine", field=field)
