"""One process's channels to others, one per target and role."""

from __future__ import annotations

import asyncio

import grpc

from baton.core.errors import Internal, Unavailable
from baton.rpc.tls import Certificates
from baton.rpc.transport import open_channel


class Channels:
    """Owns its channels until `drop` or `close`. Used on one event loop."""

    def __init__(self, certificates: Certificates | None = None, *, token: str = "") -> None:
        """certificates: what this process shows its peers; None: there is no TLS inside Baton.
        token: what it shows them with every call, see `baton.rpc.peer_token`.
        """
        self._certificates = certificates
        self._token = token
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._closed = False

    def get(self, target: str, role: str = "") -> grpc.aio.Channel:
        """The channel to "host:port". It connects on first use and again by itself.

        role: what the peer's certificate must say; needed with certificates only.
        """
        if self._closed:
            raise Unavailable("this process is leaving")
        channel = self._channels.get((target, role))
        if channel is None:
            if self._certificates is not None and not role:
                raise Internal("a peer without a role cannot be checked")
            channel = open_channel(target, self._certificates, role, token=self._token)
            self._channels[target, role] = channel
        return channel

    async def drop(self, target: str, role: str = "") -> None:
        """Closes the channel to a peer that is gone for good; its calls are cancelled."""
        channel = self._channels.pop((target, role), None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all; their calls are cancelled. Idempotent."""
        self._closed = True
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
