"""gRPC channel arguments of Baton's servers and channels, each with its reason; opens nothing."""

from __future__ import annotations

from dataclasses import dataclass

Arguments = tuple[tuple[str, int | str], ...]

INTERNAL_MESSAGE_BYTES = 64 * 2**20
"""Bounds a fault, not work: a prompt of a million tokens is 4 MiB, KV never travels in gRPC."""

PUBLIC_RECEIVE_BYTES = 2**20
PUBLIC_STREAMS = 100

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

_SERVER: Arguments = (
    # Two servers on one port would share its connections at random; that must be an error.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Less than the clients' interval: gRPC's own default of 300 s answers pings with GOAWAY
    # too_many_pings, which ends every call of the connection. (The name has no "recv" in it.)
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

INTERNAL_SERVER: Arguments = (
    *_SERVER,
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
)
"""No limit on streams: a cancel must never wait behind work. Work is bounded by the processes."""


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """What a public port bears of connections. idle_s: without a call. max_age_s: an older one
    takes no new calls, and its client opens another, maybe to another server; varied by a tenth.
    last_calls_s: what running calls get from then on. handshake_s: to the end of HTTP/2's greeting.
    streams: calls of one connection at a time.
    """

    max_connections: int = 4096
    idle_s: float = 75.0
    max_age_s: float = 8.0
    last_calls_s: float = 3600.0
    handshake_s: float = 10.0
    streams: int = PUBLIC_STREAMS


def public_server(limits: PublicLimits) -> Arguments:
    """How far a stream runs ahead of a slow reader is the reader's own window: 4 MiB with gRPC's
    defaults, and no argument of the server changes that (measured).
    """
    return (
        *_SERVER,
        ("grpc.max_receive_message_length", PUBLIC_RECEIVE_BYTES),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_metadata_size", 16 * 2**10),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_s)),
        ("grpc.max_connection_age_ms", _ms(limits.max_age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(limits.last_calls_s)),
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_s)),
    )


def longest_age_s(limits: PublicLimits) -> float:
    """After so long a connection takes no new calls. gRPC varies an age by a tenth."""
    return 1.1 * limits.max_age_s


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
