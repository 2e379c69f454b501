"""How a router leaves without losing a request: the order of it. Knows no signals.

At SIGTERM it is not ready, for good. It still takes requests for lame_duck_s, since those who send
them may not know yet; over HTTP each answer is its connection's last. Then gRPC clients are told to
connect elsewhere, and what they had sent before they heard it is taken as well. From then on a new
request, over HTTP, is refused: it is told to try again, at another router. When the running ones
have ended it is done. What is left after drain_timeout_s ends with an error that says to try again
(`Pipeline.cut`).
"""

from __future__ import annotations

import asyncio

from baton.router.config import RouterConfig
from baton.router.http.server import HttpServer
from baton.router.pipeline import Pipeline
from baton.rpc.server import ProcessServer

SETTLE_S = 0.2
"""What gRPC's goodbye takes to reach the clients, and their last calls to reach us."""


class Leaving:
    """longest_s: all of it."""

    def __init__(
        self, pipeline: Pipeline, http: HttpServer, server: ProcessServer, config: RouterConfig
    ) -> None:
        self._pipeline, self._http, self._server = pipeline, http, server
        self._lame_duck_s = config.lame_duck_s
        self.longest_s = config.lame_duck_s + SETTLE_S + config.drain_timeout_s

    async def run(self) -> None:
        """Returns when no request is left."""
        self._pipeline.leave()
        self._http.leave()
        await asyncio.sleep(self._lame_duck_s)
        away = asyncio.create_task(self._server.send_away(self.longest_s))
        try:
            await asyncio.sleep(SETTLE_S)
            await self._pipeline.drain()
        finally:
            # The server's own `stop` ends what it still waits for.
            away.cancel()
            await asyncio.wait({away})
