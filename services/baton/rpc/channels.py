"""One process's channels to others, one per target and reused; knows nothing of what is called."""

from __future__ import annotations

import asyncio

import grpc

from baton.core.errors import Unavailable
from baton.rpc.options import CLIENT


class Channels:
    """Owns its channels until `drop` or `close`. Used on one event loop."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def get(self, target: str) -> grpc.aio.Channel:
        """The channel to "host:port". It connects on first use and again by itself."""
        if self._closed:
            raise Unavailable("this process is leaving")
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = grpc.aio.insecure_channel(target, options=CLIENT)
        return channel

    async def drop(self, target: str) -> None:
        """Closes the channel to a peer that is gone for good; its calls are cancelled."""
        channel = self._channels.pop(target, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all; their calls are cancelled. Idempotent."""
        self._closed = True
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
