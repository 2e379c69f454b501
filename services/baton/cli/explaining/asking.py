"""Asks routers what they remember of a request, one after the other."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from baton.cli.access import Access
from baton.cli.http_client import Answer, ConnectionLost, HttpClient, Unreachable
from baton.core.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from baton.rpc.address import join, split

ASK_S = 10.0


def ask(routers: list[Access], path: str) -> bytes:
    """What the first router that knows says.

    Raises NotFound when all were asked and none knows, Unavailable when some could not be asked,
    Unauthenticated.
    """
    return asyncio.run(_ask(routers, path))


def path_of(request_id: str, query: str = "") -> str:
    """Raises InvalidArgument for what is no id."""
    if not request_id or len(request_id) > 256 or not request_id.isprintable():
        raise InvalidArgument("must be a request's id", field="ID")
    return f"/requests/{quote(request_id, safe='')}{query}"


def everyone(access: Access) -> list[Access]:
    """All addresses of a name, as a headless service has one for each replica. With TLS the name
    itself: it is what the certificate is for. Raises InvalidArgument."""
    host, port = split(access.address, "http")
    if access.ca is not None:
        return [access]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [access]
    if host == "localhost":
        return [access]
    addresses = dict.fromkeys(join(str(target[0]), port) for *_, target in found)
    return [replace(access, address=address) for address in addresses]


async def _ask(routers: list[Access], path: str) -> bytes:
    silent = []
    for router in routers:
        answer = await _try(router, path)
        if answer is None:
            silent.append(router.address)
        elif answer.status == 200:
            return answer.body
        elif answer.status == 401:
            raise Unauthenticated("the router wants an API key: the tenant's or an operator's")
        elif answer.status != 404 or _of_replay(answer.body):
            raise Unavailable(f"{router.address}: {_message(answer)}")
    if silent:
        raise Unavailable(f"nobody answers on {', '.join(silent)}")
    asked = "the router remembers" if len(routers) == 1 else f"{len(routers)} routers remember"
    raise NotFound(
        f"{asked} no such request of yours: it is another router's, or too long ago, or not kept"
    )


async def _try(router: Access, path: str) -> Answer | None:
    """None when nobody answers."""
    client = HttpClient(router)
    try:
        return await client.get(path, ASK_S)
    except (Unreachable, ConnectionLost, TimeoutError):
        return None
    finally:
        await client.close()


def _of_replay(body: bytes) -> bool:
    """Whether the request is known, and only its replay is not."""
    return _error(body).get("param") == "replay"


def _message(answer: Answer) -> str:
    return str(_error(answer.body).get("message", f"status {answer.status}"))


def _error(body: bytes) -> dict[str, Any]:
    with suppress(ValueError, TypeError, KeyError):
        error = json.loads(body)["error"]
        if isinstance(error, dict):
            return error
    return {}
