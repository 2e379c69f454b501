"""gRPC channels of Baton's processes and clients: their arguments, TLS, token and closing.

A process opens channels to its peers through one `Channels`; a client opens its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from batonlm.core.errors import Internal, Unavailable
from batonlm.rpc.peers import PEER_TOKEN_KEY, server_name
from batonlm.rpc.tls import Certificates, Pems, channel_credentials

Arguments = tuple[tuple[str, int | str], ...]

INTERNAL_MESSAGE_BYTES = 64 * 2**20
"""A bound for faults that no real message reaches: a prompt of a million tokens is 4 MiB, and KV
never travels in gRPC."""

_CLIENT: Arguments = (
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    # An unreachable peer is detected after 15 s, even on a channel without calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker restarted on the same port is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Peers are reached directly, even if the environment names a proxy.
    ("grpc.enable_http_proxy", 0),
    # Each Channels has its own connections, and so its own reconnect back-off.
    ("grpc.use_local_subchannel_pool", 1),
)

_CONNECT = "grpc.min_reconnect_backoff_ms"
"""gRPC's name for the timeout of one connection attempt."""

INTERNAL_CLIENT: Arguments = (
    *_CLIENT,
    # Short, because the caller can choose another peer.
    (_CONNECT, 1_000),
)

PUBLIC_CLIENT: Arguments = (
    *_CLIENT,
    # The same as a router's handshake timeout. A handshake took 1.2 s on a node short of CPUs, and
    # a call fails when the connection attempt that it waits for does.
    (_CONNECT, 10_000),
)


LONGEST_CALL_S = 24 * 3600.0
"""The time that calls on a channel with an older certificate get to end."""


def bind(server: grpc.aio.Server, listen: str, certificates: Certificates | None = None) -> int:
    """Binds a port of a server that is not started yet, and returns it. Raises RuntimeError when it
    cannot be bound."""
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
    """A channel to "host:port".

    role: the peer's, which its certificate must name. token: sent with every call, see
    `batonlm.rpc.peers`; empty: none. plain: the arguments of a channel without certificates.
    """
    if certificates is None and not token:
        return grpc.aio.insecure_channel(target, options=plain)
    return PeerChannel(target, certificates, role, token=token, plain=plain)


def open_blocking_channel(target: str, ca: bytes | None = None) -> grpc.Channel:
    """A client's channel to a router, for threads.

    ca: the trusted CAs as PEM, empty for gRPC's own list; the router's certificate must then name
    the host of target. None: plain text.
    """
    if ca is None:
        return grpc.insecure_channel(target, options=PUBLIC_CLIENT)
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(ca or None), options=PUBLIC_CLIENT
    )


def open_client_channel(target: str, ca: bytes | None = None) -> grpc.aio.Channel:
    """Like `open_blocking_channel`, for the running event loop."""
    if ca is None:
        return grpc.aio.insecure_channel(target, options=PUBLIC_CLIENT)
    credentials = grpc.ssl_channel_credentials(ca or None)
    return grpc.aio.secure_channel(target, credentials, options=PUBLIC_CLIENT)


class PeerChannel(grpc.aio.Channel):
    """A channel whose calls use the current certificate and send the token.

    A gRPC channel's certificate is fixed. When the files change, this opens a new gRPC channel for
    new calls; open calls stay on the old one, which is closed when they have ended.
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
        """Metadata added to every call."""

    def current(self) -> grpc.aio.Channel:
        """The gRPC channel for a call that begins now."""
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
    """One method of a stub, always called on the current channel."""

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
        """certificates: what this process presents to its peers; None: no TLS inside Baton.
        token: what it sends with every call, see `batonlm.rpc.peers`.
        """
        self._certificates = certificates
        self._token = token
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._channels)

    def get(self, target: str, role: str = "") -> grpc.aio.Channel:
        """The channel to "host:port". It connects on first use and reconnects by itself.

        role: the one that the peer's certificate must name; required only with certificates. Raises
        Unavailable after `close`.
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
        """Closes all channels and cancels their calls. Idempotent."""
        self._closed = True
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
