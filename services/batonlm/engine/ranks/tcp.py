"""Links over TCP, between machines: each end shows the other that it knows the group's token.

A connection begins with numbers that both ends draw. What they answer is keyed with the token,
which itself does not cross the network, and no answer serves twice. Until then the end that listens
reads 69 bytes of a connection and holds it for HELLO_S. Messages after that are neither sealed nor
signed: whoever can change what the network carries can change them, as with gloo and NCCL.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic
from typing import NamedTuple

from batonlm.engine.ranks.link import LinkLost

log = logging.getLogger(__name__)

LOST_S = 10.0
"""A connection whose other end's machine has acknowledged nothing for so long has ended: the
machine is gone, or the network between is."""
HELLO_S = 5.0
"""Longest time from a connection to its link."""
MAX_WAITING = 64
"""Connections at once that have not shown the token; the oldest makes room for another one."""
RETRY_S = 0.5

_NONCE_BYTES = 32
_MAC_BYTES = 32
_NAME = struct.Struct("<BI")
_HELLO_BYTES = _NAME.size + _NONCE_BYTES + _MAC_BYTES

Address = tuple[str, int]
"""Host and port."""


class LinkKind(IntEnum):
    """What a link is for."""

    MACHINE = 0
    """The group's shape, and payloads in messages."""
    MACHINE_WATCH = 1
    STEPS = 2
    COPIES = 3
    WATCH = 4


RANK_KINDS = (LinkKind.STEPS, LinkKind.COPIES, LinkKind.WATCH)
"""The links of each rank, in the order in which its process takes them."""


class LinkName(NamedTuple):
    kind: LinkKind
    number: int
    """Of the rank, or of the machine."""


def key_of(token: str, group: str) -> bytes:
    """The key of one group of machines. group: its name, so that a machine of another group with
    the same token is a stranger."""
    return blake2b(group.encode(), key=blake2b(token.encode(), digest_size=32).digest()).digest()


def gather(
    listener: socket.socket,
    key: bytes,
    wanted: Collection[LinkName],
    timeout_s: float,
    joined: Callable[[LinkName, socket.socket], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Calls `joined` with the connection of each wanted link, once for each. Strangers are closed.

    Raises LinkLost when some are missing after `timeout_s`; and what `check` raises, which is
    called every second.
    """
    missing = set(wanted)
    waiting: dict[int, _Caller] = {}
    end = monotonic() + timeout_s
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    warned = False

    def drop(fd: int) -> _Caller:
        poll.unregister(fd)
        return waiting.pop(fd)

    try:
        while missing:
            check()
            now = monotonic()
            for fd in [fd for fd, caller in waiting.items() if now > caller.end]:
                drop(fd).socket.close()
            if now > end:
                raise LinkLost
            for fd, _ in poll.poll(1000 * min(end - now, 1.0)):
                if fd == listener.fileno():
                    if len(waiting) == MAX_WAITING:
                        drop(next(iter(waiting))).socket.close()
                    with suppress(OSError):
                        caller = _Caller(listener.accept()[0], key)
                        waiting[caller.socket.fileno()] = caller
                        poll.register(caller.socket, select.POLLIN)
                    continue
                if fd not in waiting:
                    continue
                try:
                    name = waiting[fd].read()
                except LinkLost:
                    drop(fd).socket.close()
                    if not warned:
                        log.warning("refused a connection that does not show the group's token")
                    warned = True
                    continue
                if name is not None:
                    found = drop(fd).socket
                    if name not in missing:
                        log.error("%s %d joined twice or is not of this group", *name)
                        found.close()
                        continue
                    missing.remove(name)
                    joined(name, found)
    finally:
        for caller in waiting.values():
            caller.socket.close()


class _Caller:
    """A connection that has not shown the token yet."""

    def __init__(self, connection: socket.socket, key: bytes):
        self.socket, self._key = connection, key
        self.end = monotonic() + HELLO_S
        self._nonce, self._data = os.urandom(_NONCE_BYTES), b""
        connection.setblocking(False)
        _tune(connection)
        connection.send(self._nonce)

    def read(self) -> LinkName | None:
        """Which link it is, once that is known and answered. Raises LinkLost for a stranger."""
        try:
            part = self.socket.recv(_HELLO_BYTES - len(self._data))
            self._data += part
            if not part:
                raise LinkLost
            if len(self._data) < _HELLO_BYTES:
                return None
            name, nonce = self._data[: _NAME.size], self._data[_NAME.size : -_MAC_BYTES]
            shown = _mac(self._key, b"join", self._nonce, nonce, name)
            if not compare_digest(shown, self._data[-_MAC_BYTES:]):
                raise LinkLost
            kind, number = _NAME.unpack(name)
            self.socket.send(_mac(self._key, b"joined", nonce, self._nonce, name))
            return LinkName(LinkKind(kind), number)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise LinkLost from error


def connect(address: Address, key: bytes, name: LinkName, timeout_s: float) -> socket.socket:
    """The connection of one link, made as soon as the other end listens and shows the token.
    Raises LinkLost after `timeout_s`."""
    end = monotonic() + timeout_s
    warned = False
    while True:
        try:
            return _connect(address, key, _NAME.pack(*name))
        except OSError as error:
            if monotonic() > end:
                raise LinkLost from error
        except LinkLost:
            if not warned:
                log.warning("refused by %s, or it has another token; trying again", address[0])
            warned = True
            if monotonic() > end:
                raise
        time.sleep(RETRY_S)


def _connect(address: Address, key: bytes, name: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=HELLO_S)
    try:
        _tune(connection)
        nonce = os.urandom(_NONCE_BYTES)
        theirs = _receive(connection, _NONCE_BYTES)
        connection.sendall(name + nonce + _mac(key, b"join", theirs, nonce, name))
        shown = _receive(connection, _MAC_BYTES)
        if not compare_digest(shown, _mac(key, b"joined", nonce, theirs, name)):
            raise LinkLost
        return connection
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise LinkLost
        data += part
    return data


def _mac(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """All parts but the purpose have fixed sizes."""
    return blake2b(
        b"".join(parts), key=key, digest_size=_MAC_BYTES, person=purpose.ljust(16, b"\0")
    ).digest()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_S * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LOST_S / 2))
