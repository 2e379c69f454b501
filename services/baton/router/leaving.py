"""How a router leaves without losing a request: the order of it.

At SIGTERM it is not ready, for good. It still takes requests for lame_duck_s, since those who send
them may not know yet; over HTTP each answer is its connection's last. Then new gRPC connections are
refused, and each open one is told to connect elsewhere as it gets old, so that no call meets a
server that is gone (decision 028). HTTP connections without a request end after that, and a new
request is refused: it is told to try again, at another router. When the running ones have ended it
is done. What is left after drain_timeout_s ends with an error that says to try again
(`Pipeline.cut`).

Without a lame duck there is no other router to go to, and nobody is waited for.
"""

from __future__ import annotations

import asyncio

from baton.router.api.http.server import HttpServer
from baton.router.config import RouterConfig
from baton.router.request.pipeline import Pipeline
from baton.rpc.server import ProcessServer


class Leaving:
    """longest_s: all of it."""

    def __init__(
        self, pipeline: Pipeline, http: HttpServer, server: ProcessServer, config: RouterConfig
    ) -> None:
        self._pipeline, self._http, self._server = pipeline, http, server
        self._lame_duck_s = config.lame_duck_s
        self.longest_s = config.lame_duck_s + config.drain_timeout_s
        if config.lame_duck_s:
            self.longest_s += server.goodbye_s

    async def run(self) -> None:
        """Returns when no request is left."""
        self._pipeline.leave()
        self._http.leave()
        if self._lame_duck_s:
            await asyncio.sleep(self._lame_duck_s)
            await self._server.send_away()
        self._http.end_idle()
        await self._pipeline.drain()
