"""Which public addresses need keys, and what is unwise about the others; opens nothing.

Loopback is this machine's own: there a laptop's user may try things. Every other address needs keys
or a flag that says that none are meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.core.errors import InvalidArgument
from baton.rpc.address import is_loopback, split


def check(faces: Mapping[str, str], *, keys: bool, allow_anonymous: bool) -> None:
    """faces: "host:port" by option. Raises InvalidArgument naming the option at fault."""
    if keys and allow_anonymous:
        raise InvalidArgument("contradicts keys: say only one of them", field="allow_anonymous")
    for name, host in _beyond(faces):
        if not (keys or allow_anonymous):
            raise InvalidArgument(
                f"{host} is reached from other machines, so callers have to show keys: give "
                "--keys FILE ('baton keys new' makes one), listen on 127.0.0.1, or say "
                "--allow-anonymous to answer anybody",
                field=name,
            )


def warnings(
    faces: Mapping[str, str], *, keys: bool, tls: bool, tls_terminated: bool
) -> Iterator[str]:
    """What the operator should know of a configuration that passed `check`."""
    if not keys:
        for name, host in _beyond(faces):
            yield f"{name}: anybody who reaches {host} is answered (allow_anonymous)" + (
                ", over HTTP by an address or a name of allowed_hosts"
                if name == "http_listen"
                else ""
            )
    elif not (tls or tls_terminated):
        for name, host in _beyond(faces):
            yield (
                f"{name}: keys and texts reach {host} in plain text; give public_tls_cert, or say "
                "tls_terminated if something in front speaks TLS"
            )


def _beyond(faces: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, address in faces.items():
        host, _ = split(address, name)
        if not is_loopback(host):
            yield name, host
