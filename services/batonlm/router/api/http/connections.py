"""Monitors the HTTP server's connections through the kernel, and ends those that exceed limits.

The server (granian) bounds heads, trailers, frames and the number of connections, and passes
requests to the application. It reveals nothing about a connection that never sends a request, stays
idle for ever over HTTP/2, or does not read its answer. The process's own sockets do. `look` lists
them (`/proc/self/fd`), joins each with the requests that `begin` and `end` report, and shuts down
what the limits do not allow. It only shuts sockets down; the server, which owns them, sees the end
of the connection and closes it. Linux only: elsewhere no socket is listed, and only the server's
own limits apply.
"""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of HTTP connections. Times are in seconds."""

    max_connections: int = 4096
    """At the same time. Further connections wait in the kernel's queue."""
    max_per_address: int = 1024
    """Connections from one address; 0: no separate limit."""
    max_head_bytes: int = 16 << 10
    """Of a request's first line and headers; at least 8 KiB."""
    max_streams: int = 100
    """Simultaneous requests on one HTTP/2 connection."""
    head_timeout_s: float = 10.0
    """From a connection's start, or from a request's first byte, to the end of its headers."""
    body_timeout_s: float = 30.0
    """From the end of the headers to the end of the body."""
    body_start_s: float = 5.0
    """From here on body_bytes_per_s applies."""
    body_bytes_per_s: float = 1024.0
    """Lowest average rate of a body."""
    stall_timeout_s: float = 30.0
    """How long a client may read nothing of what waits for it."""
    keep_alive_s: float = 75.0
    """Between two requests."""
    max_age_s: float = 300.0
    """An older connection ends with its next answer. It varies by a tenth per connection."""

    def age_s(self) -> float:
        """Returns the greatest age of one connection, varied so that connections of the same age do
        not end together."""
        return self.max_age_s * random.uniform(0.9, 1.1)


_FDS = "/proc/self/fd"
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)
# From linux/tcp.h, struct tcp_info: state, unacked segments, bytes_acked, bytes_received,
# notsent_bytes.
_INFO = struct.Struct("=B23xI92xQQ8xI")
_GONE = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT: the peer has reset or ended the connection."""

KERNEL_SEND_BUFFER_BYTES = 128 << 10
"""The kernel's send buffer of one connection, which the kernel doubles. Without it a connection
that is not read takes megabytes."""

CROWDED = 7 / 8
"""Share of max_connections. Above it idle connections end, first those of the address with the
most."""

LOOK_SHARE = 0.1
"""Largest share of the loop's time for looks that requests cause."""

QUIET_S = 1.0
"""A connection that has had its last answer ends after this many seconds without a request. Over
HTTP/2 an answer cannot announce that it is the last, and a client that sends one request after
another must not lose the connection in between."""

BUSY_TURNS = 4
"""A connection with a request is checked in one of this many turns."""

Peer = tuple[bytes, int]
"""A client's packed address and its port."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on one connection."""

    abandon: Callable[[], None]
    """Ends the answer because its client is gone."""
    started: bool = False
    """Whether the answer has begun."""
    sending_since: float | None = None
    """Since when the current part of the answer waits for the client to read."""


@dataclass(slots=True, eq=False)
class Connection:
    """One client's connection. Times are readings of the loop's clock, in seconds."""

    peer: Peer
    opened_at: float
    """When it was first seen."""
    old_at: float
    """From this time on its next answer is its last."""
    idle_since: float
    """When its last request ended; before the first, when it was opened."""
    exchanges: set[Exchange] = field(default_factory=set)
    has_requested: bool = False
    """Whether a request ever arrived."""
    http2: bool = False
    last: bool = False
    """Whether an answer announced that it is the connection's last."""
    fd: int = -1
    inode: int = 0
    """Of its socket; 0 until it is found among the process's own."""
    received: int | None = None
    """Bytes from the peer when it became idle; None: not read yet."""
    head_since: float | None = None
    """When more bytes arrived than that: a request, or other data, has begun."""
    acked: int = -1
    """Bytes that the peer's kernel has acknowledged, as of the last check with unacknowledged
    bytes."""
    acked_at: float = 0.0
    """When that number last changed."""

    def abandon(self) -> None:
        for exchange in self.exchanges:
            exchange.abandon()


class TcpInfo(NamedTuple):
    """The kernel's numbers of one connection."""

    state: int
    unacked: int
    """In segments."""
    acked: int
    """In bytes."""
    received: int
    """In bytes."""
    unsent: int
    """Bytes in the kernel that wait for the peer."""


class Connections:
    """The connections of one server.

    leaving: every answer that begins is its connection's last. ending: idle connections end.
    """

    def __init__(self, host: str, port: int, limits: HttpLimits, now: Callable[[], float]) -> None:
        """host, port: where the server listens. now: the loop's clock."""
        self.leaving = False
        self.ending = False
        self._host, self._port = _packed(host), port
        self._limits = limits
        self._now = now
        self._by_peer: dict[Peer, Connection] = {}
        self._by_inode: dict[int, Connection] = {}
        self._others: set[int] = set()
        """Inodes of sockets that are not connections of this server."""
        self._per_address: Counter[bytes] = Counter()
        self._turn = 0
        self._found_at = float("-inf")
        self._find_s = 0.0

    def __len__(self) -> int:
        return len(self._by_inode)

    def begin(
        self, host: str, port: int, abandon: Callable[[], None], *, http2: bool
    ) -> tuple[Connection, Exchange]:
        """A request has arrived. `end` must follow in every case."""
        peer = (_packed(host), port)
        connection = self._by_peer.get(peer)
        if connection is None:
            connection = self._add(peer)
        connection.has_requested = True
        connection.http2 = http2
        connection.received = connection.head_since = None
        exchange = Exchange(abandon)
        connection.exchanges.add(exchange)
        return connection, exchange

    def end(self, connection: Connection, exchange: Exchange) -> None:
        connection.exchanges.discard(exchange)
        connection.idle_since = self._now()

    def is_last(self, connection: Connection) -> bool:
        """Whether the answer that begins now is its connection's last."""
        return self.leaving or self._now() >= connection.old_at

    def too_many(self, connection: Connection) -> bool:
        """Whether its address has more connections than allowed. It looks at the sockets first,
        because connections that closed unnoticed must not count."""
        limit = self._limits.max_per_address
        address = connection.peer[0]
        if not limit or self._per_address[address] <= limit:
            return False
        if self._now() - self._found_at >= self._find_s / LOOK_SHARE:
            self._find()
        return self._per_address[address] > limit

    def interval_s(self) -> float:
        """Returns the seconds between two looks: each limit is exact to a quarter of it, or to a
        second."""
        limits = self._limits
        shortest = min(limits.head_timeout_s, limits.keep_alive_s, limits.stall_timeout_s)
        return max(0.02, min(1.0, shortest / 4))

    def look(self) -> None:
        """Finds the connections that exist, and ends those that exceed their limits."""
        self._find()
        self._turn += 1
        now = self._now()
        for connection in list(self._by_inode.values()):
            if connection.exchanges:
                self._look_at_busy(connection, now)
            elif self._stalls(connection, self._info(connection), now):
                self._shut_down(connection, reset=True)
            elif self._exceeds_limits(connection, now):
                self._shut_down(connection)
        self._make_room()

    def end_idle(self) -> None:
        """From now on every connection ends as soon as it is idle."""
        self.ending = True
        self.look()

    def end_all(self) -> None:
        self._find()
        for connection in list(self._by_inode.values()):
            self._shut_down(connection, reset=True)

    def _look_at_busy(self, connection: Connection, now: float) -> None:
        blocked = [e.sending_since for e in connection.exchanges if e.sending_since is not None]
        # The kernel sees no stall of one HTTP/2 stream, because the connection's bytes are read.
        if connection.http2 and blocked and now - min(blocked) >= self._limits.stall_timeout_s:
            self._shut_down(connection, reset=True)
        elif blocked:
            if self._stalls(connection, self._info(connection), now):
                self._shut_down(connection, reset=True)
        elif not connection.http2 and (connection.inode + self._turn) % BUSY_TURNS == 0:
            # The client may have left after sending its next request: the server has not read that
            # yet, and so does not see the end after it.
            info = self._info(connection)
            if info is not None and info.state in _GONE:
                connection.abandon()
                self._shut_down(connection, reset=True)

    def _stalls(self, connection: Connection, info: TcpInfo | None, now: float) -> bool:
        """Whether the peer has read nothing of what waits for it for too long."""
        if info is None or not (info.unacked or info.unsent):
            connection.acked = -1
        elif info.acked != connection.acked:
            connection.acked, connection.acked_at = info.acked, now
        else:
            return now - connection.acked_at >= self._limits.stall_timeout_s
        return False

    def _exceeds_limits(self, connection: Connection, now: float) -> bool:
        """Whether a connection without a request exceeds a limit."""
        limits = self._limits
        idle_s = now - connection.idle_since
        if not connection.has_requested:
            return self.ending or idle_s >= limits.head_timeout_s
        if connection.http2:
            last = self.ending or now >= connection.old_at
            return idle_s >= (min(QUIET_S, limits.keep_alive_s) if last else limits.keep_alive_s)
        if self.ending or idle_s >= limits.keep_alive_s:
            return True
        if connection.last and idle_s >= QUIET_S:
            # The server may wait for the rest of a body that is of no use.
            return True
        info = self._info(connection)
        # Between two requests any byte, even of an empty line, begins a head.
        received = None if info is None else info.received
        if connection.received is None:
            connection.received = received
        elif received != connection.received and connection.head_since is None:
            connection.head_since = now
        since = connection.head_since
        return since is not None and now - since >= limits.head_timeout_s

    def _make_room(self) -> None:
        """Ends idle connections: of addresses with too many, and of the fullest addresses when
        crowded."""
        limit, now = self._limits.max_per_address, self._now()
        quiet_s = min(QUIET_S, self._limits.head_timeout_s)
        surplus = [(a, n - limit) for a, n in self._per_address.items() if limit and n > limit]
        over = len(self) - int(self._limits.max_connections * CROWDED)
        if over > 0 and self._per_address:
            surplus.append((self._per_address.most_common(1)[0][0], over))
        for address, count in surplus:
            idle = [
                connection
                for connection in self._by_inode.values()
                if connection.peer[0] == address
                and not connection.exchanges
                # A connection that has just opened is about to send a request.
                and now - connection.idle_since >= quiet_s
            ]
            # Those without any request go first, then those that have been idle longest.
            idle.sort(key=lambda connection: (connection.has_requested, connection.idle_since))
            for connection in idle[:count]:
                self._shut_down(connection)

    def _find(self) -> None:
        """Synchronizes the records with the process's sockets."""
        # Not the loop's clock, which stands still during a callback.
        began = time.perf_counter()
        gone = dict(self._by_inode)
        listed = False
        others: set[int] = set()
        for fd, inode in _sockets():
            listed = True
            known = self._by_inode.get(inode)
            if known is not None:
                known.fd = fd
                gone.pop(inode, None)
            elif inode in self._others or (peer := self._peer_of(fd, inode)) is None:
                others.add(inode)
            else:
                self._saw(peer, fd, inode)
        self._others = others
        for inode, connection in gone.items():
            if self._by_inode.get(inode) is connection:
                self._forget(connection)
        for connection in list(self._by_peer.values()):
            # Reset or closed before it was ever seen: a socket without a peer.
            if listed and not connection.inode:
                connection.abandon()
                self._forget(connection)
        self._found_at = self._now()
        self._find_s = time.perf_counter() - began

    def _saw(self, peer: Peer, fd: int, inode: int) -> None:
        connection = self._by_peer.get(peer)
        if connection is not None and connection.inode:
            # The same port again, on another connection.
            self._forget(connection)
            connection = None
        if connection is None:
            connection = self._add(peer)
        connection.fd, connection.inode = fd, inode
        self._by_inode[inode] = connection

    def _add(self, peer: Peer) -> Connection:
        now = self._now()
        connection = Connection(peer, now, now + self._limits.age_s(), now)
        self._by_peer[peer] = connection
        self._per_address[peer[0]] += 1
        return connection

    def _forget(self, connection: Connection) -> None:
        self._by_inode.pop(connection.inode, None)
        if self._by_peer.get(connection.peer) is connection:
            del self._by_peer[connection.peer]
        address = connection.peer[0]
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]

    def _peer_of(self, fd: int, inode: int) -> Peer | None:
        """Returns the peer of one of the server's connections; None for any other socket."""
        with _held(fd, inode) as held, suppress(OSError):
            if held is None or held.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host, port = held.getsockname()[:2]
            if port == self._port and (not any(self._host) or _packed(host) == self._host):
                peer_host, peer_port = held.getpeername()[:2]
                return _packed(peer_host), peer_port
        return None

    def _info(self, connection: Connection) -> TcpInfo | None:
        """Returns None where the kernel provides no numbers."""
        with _held(connection.fd, connection.inode) as held, suppress(OSError):
            if held is not None and _TCP_INFO is not None:
                info = held.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size)
                return TcpInfo(*_INFO.unpack(info)) if len(info) == _INFO.size else None
        return None

    def _shut_down(self, connection: Connection, *, reset: bool = False) -> None:
        """Shuts the socket down. reset: the kernel discards unsent data of a peer that does not
        read."""
        with _held(connection.fd, connection.inode) as held, suppress(OSError):
            if held is None:
                return
            if reset:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            held.shutdown(socket.SHUT_RDWR)


def tune_listeners(host: str, port: int, stall_timeout_s: float) -> bool:
    """Sets socket options that accepted connections inherit from the listening sockets: the
    kernel's send buffer, and how long unread data is kept after the server closes. Returns whether
    there is such a socket."""
    found = False
    for _, held in _bound(host, port):
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found = True
            held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BUFFER_BYTES)
            if _USER_TIMEOUT is not None:
                # Later than `look`, which resets connections that are still open.
                timeout_ms = int(2000 * stall_timeout_s)
                held.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, timeout_ms)
    return found


def close_left_over(host: str, port: int) -> None:
    """Closes sockets that are bound there and neither listen nor are connected.

    granian leaves one open after each start, and with it the port bound. Call it only when no
    server of this process uses this address any more.
    """
    for fd, held in _bound(host, port):
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        try:
            held.getpeername()
        except OSError:
            with suppress(OSError):
                os.close(fd)


def _bound(host: str, port: int) -> Iterator[tuple[int, socket.socket]]:
    """Yields sockets of this process that are bound there: the file descriptor, and a second
    handle."""
    address = (_packed(host), port)
    for fd, inode in list(_sockets()):
        with _held(fd, inode) as held, suppress(OSError):
            if held is None or held.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own_host, own_port = held.getsockname()[:2]
            if (_packed(own_host), own_port) == address:
                yield fd, held


def _sockets() -> Iterator[tuple[int, int]]:
    """Yields file descriptor and inode of each socket of this process."""
    try:
        names = os.listdir(_FDS)
    except OSError:
        return
    for name in names:
        # Another thread may close any of them at any time.
        with suppress(OSError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


@contextmanager
def _held(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Opens a second handle of a socket, so that its descriptor cannot become another file
    meanwhile; yields None when the socket is gone."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with held:
        yield held if os.fstat(copy).st_ino == inode else None


def _packed(host: str) -> bytes:
    """Returns one form of each address, however it is written; an IPv4-mapped address becomes
    IPv4."""
    try:
        return socket.inet_pton(socket.AF_INET, host)
    except OSError:
        pass
    try:
        packed = socket.inet_pton(socket.AF_INET6, host)
    except OSError:
        return host.encode()
    return packed[12:] if packed[:12] == b"\0" * 10 + b"\xff\xff" else packed
