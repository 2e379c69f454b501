"""Link, one end of a stream of messages between the runner and a rank.

A stream socket carries it, whichever kind: a pair of sockets where the rank is a process of this
machine, TCP where it is on another one. The kernel ends the stream when the other process dies, so
a lost rank is noticed at once by whoever waits for it. `watch` notices it while nobody does, and
also a process that hangs or is stopped.

Messages are bytes behind their length. Of one link, one thread at a time sends and receives.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic

SILENCE_S = 30.0
"""A process whose watch shows no life for so long has ended or hangs. Longer than a library keeps
Python's lock, which is most while it starts CUDA on a machine of eight GPUs."""
_BEATS = 30
"""Of a watch, in the time after which silence is taken for the end."""

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 1 << 30
"""A longer message is no message of ours."""


class LinkLost(Exception):
    """The other end has closed the link or has died, or has not done its part within the time."""


class Link:
    """Takes the socket over; `close` closes it."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """This end's own IP address; "" where there is none."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def peer(self) -> str:
        """The other end's IP address; "" where there is none."""
        name = self._socket.getpeername()
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: bytes, timeout_s: float) -> None:
        """Raises LinkLost. While the other end takes nothing, what comes from it is read: it may be
        sending, too, and would wait for us."""
        end = monotonic() + timeout_s
        data = memoryview(_LENGTH.pack(len(message)) + message)
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                _wait([self], select.POLLIN | select.POLLOUT, end)
                self._read()
            except OSError as error:
                raise LinkLost from error

    def receive(self, timeout_s: float | None) -> bytes:
        """The next message; without a time, as long as the other end lives. Raises LinkLost."""
        end = None if timeout_s is None else monotonic() + timeout_s
        while (message := self._next()) is None:
            _wait([self], select.POLLIN, end)
            self._read()
        return message

    def cut(self) -> None:
        """Ends the stream: calls of both ends, also one under way on another thread, raise
        LinkLost. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. The other end's next call raises LinkLost."""
        # Ends the stream though `watch` holds the socket open.
        self.cut()
        self._socket.close()

    def _next(self) -> bytes | None:
        """A message that has come in whole."""
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > MAX_MESSAGE_BYTES:
            raise LinkLost
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def _read(self) -> None:
        try:
            part = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLost from error
        if not part:
            raise LinkLost
        self._received += part


def receive_each(links: Sequence[Link], timeout_s: float) -> Iterator[tuple[int, bytes]]:
    """Yields (index, message), one message of each link, as they come. Raises LinkLost."""
    end = monotonic() + timeout_s
    waiting = dict(enumerate(links))
    while waiting:
        ready = [(i, found) for i, link in waiting.items() if (found := link._next()) is not None]
        for i, message in ready:
            del waiting[i]
            yield i, message
        if waiting and not ready:
            _wait_and_read(list(waiting.values()), end)


def receive_first(links: Sequence[Link], timeout_s: float) -> tuple[int, bytes]:
    """(index, message), the next one of whichever link. Raises LinkLost, also when one of the links
    has ended before any of them has a message."""
    end = monotonic() + timeout_s
    while True:
        for i, link in enumerate(links):
            if (message := link._next()) is not None:
                return i, message
        _wait_and_read(links, end)


def watch(links: Sequence[Link], lost: Callable[[], None], *, silence_s: float = SILENCE_S) -> None:
    """Shows life at these links, and calls `lost` once, on the same daemon thread, when the first
    of them has ended, whichever end closed it, or its other end has shown life before but none
    for `silence_s`.

    Both ends of a link are watched with the same time, and it carries nothing else. Silence is
    counted in beats of our own, so that a pause of the whole machine is not taken for one, and
    from the first sign of life on: the other process may have to start first.
    """
    if not links:
        return
    ends = {end.fileno(): end for end in (link._socket.dup() for link in links)}

    def run() -> None:
        try:
            _beat_until_lost(ends, silence_s / _BEATS)
        finally:
            for end in ends.values():
                end.close()
            lost()

    threading.Thread(target=run, name="rank-watch", daemon=True).start()


def _beat_until_lost(ends: dict[int, socket.socket], beat_s: float) -> None:
    """Returns when one of the sockets has ended or is silent for _BEATS beats of our own."""
    silent: dict[int, int] = {}
    poll = select.poll()
    for fd in ends:
        poll.register(fd, select.POLLIN | select.POLLRDHUP)
    next_beat = monotonic()
    while max(silent.values(), default=0) <= _BEATS:
        for fd, events in poll.poll(max(0.0, next_beat - monotonic()) * 1000):
            # What is read does not matter; an end shows in the events.
            if events != select.POLLIN:
                return
            with suppress(OSError):
                ends[fd].recv(_READ_BYTES)
            silent[fd] = 0
        if monotonic() >= next_beat:
            next_beat = monotonic() + beat_s
            for fd in silent:
                silent[fd] += 1
            for end in ends.values():
                # One that takes nothing is silent, too; one that has ended shows in the events.
                with suppress(OSError):
                    end.send(b"\0")


def _wait_and_read(links: Sequence[Link], end: float) -> None:
    _wait(links, select.POLLIN, end)
    for link in links:
        link._read()


def _wait(links: Sequence[Link], events: int, end: float | None) -> None:
    """Until one of the links is ready. Raises LinkLost at `end`, a reading of the clock."""
    poll = select.poll()
    try:
        for link in links:
            poll.register(link, events)
        ready = poll.poll(None if end is None else max(0.0, end - monotonic()) * 1000)
    except (OSError, ValueError) as error:
        raise LinkLost from error
    if not ready:
        raise LinkLost
