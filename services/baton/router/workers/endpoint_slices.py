"""What Kubernetes' EndpointSlices say of a service's endpoints; speaks to nobody.

Objects are the API's own JSON, discovery.k8s.io/v1. How the conditions are read, null being the
first choice of each:

    terminating   null, false   the pod is meant to run
                  true          it was told to end: not listed. Whoever it is known to drains by its
                                own word and is followed until it is gone
    ready         null, true    it may be sent to. Counted where nobody tells more, as for routers
                  false         it starts, or its probe fails: listed all the same. A worker says
                                itself what it can do, and sooner than a probe
    serving       -             `ready` of a pod that may be terminating: says nothing more here
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.rpc.address import join

MAX_ENDPOINTS = 4096

Json = Mapping[str, Any]

_FAMILIES = ("IPv4", "IPv6")
"""Best first: a pod with both is one endpoint. Names (FQDN) are no addresses of pods."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod. address: host:port."""

    address: str
    ready: bool
    terminating: bool


def endpoints(slices: Iterable[Json], port: str) -> tuple[Endpoint, ...]:
    """All endpoints of a service, each once, in order of address.

    port: digits, used as they are, or the name of one of the slices' ports; a slice without such a
    port has none of the endpoints.
    """
    found: dict[str, Endpoint] = {}
    held = list(slices)
    for family in _FAMILIES:
        for entry in held:
            number = _port(entry, port)
            if entry.get("addressType") == family and number is not None:
                for pod, endpoint in _of_slice(entry, number):
                    # While an endpoint moves from one slice to another it is in both for a moment.
                    if pod not in found or found[pod].terminating:
                        found[pod] = endpoint
    return tuple(sorted(found.values(), key=lambda each: each.address))[:MAX_ENDPOINTS]


def _of_slice(entry: Json, port: int) -> Iterable[tuple[str, Endpoint]]:
    for endpoint in entry.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        if not addresses:
            continue
        conditions = endpoint.get("conditions") or {}
        pod = (endpoint.get("targetRef") or {}).get("uid") or addresses[0]
        yield (
            pod,
            Endpoint(
                join(addresses[0], port),
                ready=conditions.get("ready") is not False,
                terminating=conditions.get("terminating") is True,
            ),
        )


def _port(entry: Json, wanted: str) -> int | None:
    if wanted.isdecimal():
        return int(wanted)
    for port in entry.get("ports") or ():
        if port.get("name") == wanted and port.get("port"):
            return int(port["port"])
    return None
