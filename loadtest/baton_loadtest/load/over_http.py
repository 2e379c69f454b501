"""Asks a router's `/v1/completions` for streamed tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from baton.cli.access import Access
from baton.cli.http_client import ConnectionLost, Unreachable, trust
from baton.rpc.address import split
from baton_loadtest.load.connection import Connection
from baton_loadtest.load.events import Events
from baton_loadtest.load.samples import ANSWERED, REFUSED

_REFUSED_STATUS = 429


class OverHttp:
    """Of one server. Many requests at a time, each on a connection of its own. Close it."""

    def __init__(self, access: Access, model: str) -> None:
        """Raises InvalidArgument for what is no address, and for a CA that is none."""
        self._host, self._port = split(access.address, "http")
        self._trust = trust(access.ca)
        key = f"authorization: Bearer {access.key}\r\n" if access.key else ""
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {access.address}\r\n{key}"
            "content-type: application/json\r\ncontent-length: "
        )
        fixed = {"model": model} if model else {}
        fields = json.dumps(
            fixed | {"stream": True, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        )
        self._fields = fields.removeprefix("{")
        self._idle: list[Connection] = []

    def prepare(self, ids: Sequence[int], output_tokens: int) -> bytes:
        """Greedy, of a length known in advance."""
        prompt = ",".join(map(str, ids))
        body = f'{{"prompt":[{prompt}],"max_tokens":{output_tokens},{self._fields}'
        return f"{self._head}{len(body)}\r\n\r\n{body}".encode()

    async def ask(self, request: bytes, hear: Callable[[Sequence[int], int], None]) -> str:
        """Raises InvalidArgument for a certificate that is not trusted."""
        events = Events(hear)
        try:
            while True:
                kept = self._kept()
                connection = kept or await Connection.open(self._host, self._port, self._trust)
                try:
                    head = await connection.ask(request, events.feed)
                    break
                except ConnectionLost:
                    # A server may end an idle connection at the moment when it is used again.
                    if kept is None or connection.answered:
                        raise
        except Unreachable:
            return "no connection"
        except ConnectionLost:
            return "connection lost"
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        if head.status == _REFUSED_STATUS:
            return REFUSED
        if head.status != 200:
            return f"status {head.status}"
        if events.failed:
            return "failed while it streamed"
        return ANSWERED if events.done else "ended early"

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None
