"""Opens gRPC ports and channels, plain or with TLS: the only place that does."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.rpc import peer_token
from baton.rpc.options import INTERNAL_CLIENT, PUBLIC_CLIENT, Arguments
from baton.rpc.roles import server_name
from baton.rpc.tls import Certificates, Pems, channel_credentials

LONGEST_CALL_S = 24 * 3600.0
"""What calls that began with an older certificate get to end."""


def bind(server: grpc.aio.Server, listen: str, certificates: Certificates | None = None) -> int:
    """Opens a port before the server is started. Raises RuntimeError when it cannot be had."""
    if certificates is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, certificates.server_credentials())


def open_channel(
    target: str,
    certificates: Certificates | None = None,
    role: str = "",
    *,
    token: str = "",
    plain: Arguments = INTERNAL_CLIENT,
) -> grpc.aio.Channel:
    """A channel to "host:port". role: of the peer, which its certificate has to name. token: shown
    with every call, see `baton.rpc.peer_token`; empty: none. plain: the arguments of a channel
    without certificates.
    """
    if certificates is None and not token:
        return grpc.aio.insecure_channel(target, options=plain)
    return PeerChannel(target, certificates, role, token=token, plain=plain)


def open_blocking_channel(target: str, ca: bytes | None = None) -> grpc.Channel:
    """A client's channel to a router. ca: PEM of whom to trust, empty for gRPC's own list; the
    router's certificate then has to name the host of target. None: plain.
    """
    if ca is None:
        return grpc.insecure_channel(target, options=PUBLIC_CLIENT)
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(ca or None), options=PUBLIC_CLIENT
    )


def open_client_channel(target: str, ca: bytes | None = None) -> grpc.aio.Channel:
    """As `open_blocking_channel`, for the running event loop."""
    if ca is None:
        return grpc.aio.insecure_channel(target, options=PUBLIC_CLIENT)
    credentials = grpc.ssl_channel_credentials(ca or None)
    return grpc.aio.secure_channel(target, credentials, options=PUBLIC_CLIENT)


class PeerChannel(grpc.aio.Channel):
    """A channel whose calls begin with the certificate that is current then, and show the token.

    gRPC gives a channel its certificate for good. So there is a new one beneath when it changed:
    calls that are open stay on the old one until they end, and it is closed after them.
    """

    def __init__(
        self,
        target: str,
        certificates: Certificates | None,
        role: str,
        *,
        token: str,
        plain: Arguments,
    ) -> None:
        self._target, self._certificates = target, certificates
        self._plain = plain
        self._secure = (*INTERNAL_CLIENT, ("grpc.ssl_target_name_override", server_name(role)))
        self._pems: Pems | None = None
        self._channel: grpc.aio.Channel | None = None
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self.metadata = ((peer_token.KEY, token),) if token else ()
        """Of every call, besides its own."""

    def current(self) -> grpc.aio.Channel:
        """The channel beneath, for one call that begins now."""
        pems = None if self._certificates is None else self._certificates.current()
        if self._channel is None or pems is not self._pems:
            if self._channel is not None:
                ending = asyncio.ensure_future(self._channel.close(LONGEST_CALL_S))
                self._retired[ending] = self._channel
                ending.add_done_callback(self._retired.pop)
            self._pems = pems
            if pems is None:
                self._channel = grpc.aio.insecure_channel(self._target, options=self._plain)
            else:
                self._channel = grpc.aio.secure_channel(
                    self._target, channel_credentials(pems), options=self._secure
                )
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        retired = dict(self._retired)
        for ending in retired:
            ending.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        for channel in (*retired.values(), self._channel):
            if channel is not None:
                await channel.close(grace)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", args, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def __aenter__(self) -> PeerChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Method:
    """One method of a stub, on whichever channel is current."""

    def __init__(
        self, owner: PeerChannel, kind: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._owner, self._kind, self._args, self._options = owner, kind, args, options
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel = channel
            self._call = getattr(channel, self._kind)(*self._args, **self._options)
        if self._owner.metadata:
            options["metadata"] = (*(options.get("metadata") or ()), *self._owner.metadata)
        return self._call(*args, **options)
