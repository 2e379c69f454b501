"""How an operator writes where workers are; looks nothing up.

host:port,host:port                     a list
dns:///name:port                        every address (A, AAAA) of a name
k8s:///service[.namespace]:port         every endpoint of a Kubernetes service; port: a number,
                                        or a port's name
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidArgument
from baton.rpc.address import split

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.IGNORECASE)
_SERVICE = re.compile(rf"({_LABEL})(\.({_LABEL}))?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ListTarget:
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsTarget:
    name: str
    port: int


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """namespace: "" means the router's own. port: digits, or a name of the service's ports."""

    service: str
    namespace: str
    port: str


Target = ListTarget | DnsTarget | ServiceTarget


def parse(texts: Sequence[str], field: str) -> Target:
    """What one option says. Raises InvalidArgument that names the field."""
    named = [text for text in texts if "//" in text]
    if not named:
        for address in texts:
            if not split(address, field)[1]:
                raise InvalidArgument(f"{address!r} has no port to connect to", field=field)
        return ListTarget(tuple(texts))
    if len(texts) > 1:
        raise InvalidArgument(f"{named[0]!r} must stand alone, not in a list", field=field)
    scheme, _, rest = texts[0].partition(":///")
    name, _, port = rest.rpartition(":")
    match scheme:
        case "dns" if _HOST.fullmatch(name) and _is_port(port):
            return DnsTarget(name, int(port))
        case "k8s" if (found := _SERVICE.fullmatch(name)) and (
            _is_port(port) or _PORT_NAME.fullmatch(port)
        ):
            return ServiceTarget(found[1], found[4] or "", port)
    raise InvalidArgument(
        f"{texts[0]!r} is neither dns:///name:port nor k8s:///service[.namespace]:port",
        field=field,
    )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535
