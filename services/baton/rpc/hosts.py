"""Under which names a process answers over HTTP where it asks for no keys.

Any web page can make its reader's browser call this machine, and through a DNS name of its own that
leads here (DNS rebinding) it could read the answers, too. Such calls have the page's name as their
Host: it is refused. An IP address as Host never comes of a name. So where other machines reach the
process, addresses are allowed, and on loopback this machine's own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from baton.core.errors import InvalidArgument
from baton.rpc.address import is_loopback, split

ANY = "*"
"""The entry of allowed_hosts that allows every name."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_OWN = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """The names of one listening address."""

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
        """hosts: every Host header of one request. None at all is no name that is known."""
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
    """As a Host would have it. Raises InvalidArgument."""
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
