"""gRPC channels of Baton's processes and clients: their arguments, TLS, token and end.

A process opens channels to peers through one `Channels`; a client opens its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.core.errors import Internal, Unavailable
from baton.rpc.peers import PEER_TOKEN_KEY, server_name
from baton.rpc.tls import Certificates, Pems, channel_credentials

Arguments = tuple[tuple[str, int | str], ...]

INTERNAL_MESSAGE_BYTES = 64 * 2**20
"""Bounds a fault, not work: a prompt of a million tokens is 4 MiB, KV never travels in gRPC."""

_CLIENT: Arguments = (
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed after 15 s even on a channel without calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker restarted on the same port is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Peers are reached directly, whatever proxy the environment names for the outside world.
    ("grpc.enable_http_proxy", 0),
    # Back-off of one Channels is not another one's.
    ("grpc.use_local_subchannel_pool", 1),
)

_CONNECT = "grpc.min_reconnect_backoff_ms"
"""What gRPC calls the shortest back-off is how long one attempt to connect may take."""

INTERNAL_CLIENT: Arguments = (
    *_CLIENT,
    # Whoever waits for this peer has others to go to.
    (_CONNECT, 1_000),
)

PUBLIC_CLIENT: Arguments = (
    *_CLIENT,
    # As long as a router waits for a greeting. Its own took 1.2 s on a node short of processors,
    # and a call fails with the attempt that it waits for.
    (_CONNECT, 10_000),
)


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
    with every call, see `baton.rpc.peers`; empty: none. plain: the arguments of a channel
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
        self.metadata = ((PEER_TOKEN_KEY, token),) if token else ()
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


class Channels:
    """Owns its channels until `drop` or `close`. Used on one event loop."""

    def __init__(self, certificates: Certificates | None = None, *, token: str = "") -> None:
        """certificates: what this process shows its peers; None: there is no TLS inside Baton.
        token: what it shows them with every call, see `baton.rpc.peers`.
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
