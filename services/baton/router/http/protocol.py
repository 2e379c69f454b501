"""uvicorn's HTTP/1.1 protocol with the limits that a public port needs.

A head or a body that is too large or too slow, a client that does not read, pipelined requests,
connections that are too many or too old: all end here, below any application code. All refusals
are JSON error bodies.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.router.http.errors import HttpError
from baton.router.http.limits import (
    BODY_START_S,
    BODY_TOO_SLOW,
    HEAD_TOO_LARGE,
    HEAD_TOO_SLOW,
    NOT_HTTP,
    SEND_BUFFER_BYTES,
    TOO_MANY,
    TOO_MANY_OF_YOURS,
    Connected,
    HttpLimits,
)
from baton.router.http.respond import encode
from baton.router.http.taken import Taken, bound_buffer, end_at_once, taken

# uvicorn warns of every malformed request, so anyone could fill the log; and it reports the
# cancelled tasks of a shutdown as errors. The app logs its own failures.
_quiet = logging.getLogger("baton.router.http.protocol")
_quiet.setLevel(logging.CRITICAL)

LOOKS = 8
"""So often within the stall timeout it is looked whether the peer takes anything."""


class _Refused(Exception):
    """Stops the parser; it comes back as a parser error."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request is read by one timer at a time: its head's, then its body's."""

    def __init__(self, limits: HttpLimits, connected: Connected, **options: Any):
        super().__init__(**options)
        self.logger = _quiet
        self.access_log = False
        self._limits = limits
        self._connected = connected
        self._in_head = True
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began = 0.0
        self._refusal = NOT_HTTP
        self._read_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._taken = Taken(False, 0)
        self._taken_at = 0.0
        self._old_at = self.loop.time() + limits.age_s()
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connected.enter(self._address)
        limit = self._limits.max_per_address
        if len(self.connections) > self._limits.max_connections:
            self._refuse(TOO_MANY)
        elif limit and self._connected.by_address[self._address] > limit:
            self._refuse(TOO_MANY_OF_YOURS)
        else:
            bound_buffer(transport, SEND_BUFFER_BYTES)
            self._time_head()
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connected.leave(self._address)
        self._stop_reading_timer()
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        super().data_received(data)
        # A single endless header never reaches on_header; count it as it arrives.
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._read_timer is None:
            self._time_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_reading_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_head_bytes:
            self._refusal = HEAD_TOO_LARGE
            raise _Refused
        if self._answering():
            # uvicorn would queue a pipelined request and stop reading, and so miss that the client
            # left. The running answer is the connection's last instead: clients then send again.
            self.cycle.keep_alive = False
            self._deaf = True
            raise _Refused
        super().on_headers_complete()
        if self._connected.leaving or self.loop.time() >= self._old_at:
            self.cycle.keep_alive = False
        self._body_bytes, self._body_began = 0, self.loop.time()
        self._time_body()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        self._stop_reading_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._connected.ending:
            self.end_if_idle()

    def end_if_idle(self) -> None:
        """Hangs up between two requests."""
        if not self._answering() and self._read_timer is None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever stopped the parser; its own text is not sent."""
        if not self._deaf:
            self._refuse(self._refusal)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _look(self) -> None:
        """Cuts a client that has taken nothing for too long. Buffers it has not filled are ours."""
        now, was = self.loop.time(), self._taken
        self._taken = taken(self.transport)
        if self._taken != was or not self._taken.waiting:
            self._taken_at = now
        elif now - self._taken_at >= self._limits.stall_timeout_s:
            end_at_once(self.transport)
            return
        self._look_timer = self.loop.call_later(self._limits.stall_timeout_s / LOOKS, self._look)

    def _time_head(self) -> None:
        self._read_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        """A client that sent nothing at all gets no answer either: it asked nothing."""
        if self._head_bytes:
            self._refuse(HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _time_body(self) -> None:
        """Until what has arrived is too little for the time it took."""
        rate_s = BODY_START_S + self._body_bytes / self._limits.body_bytes_per_s
        allowed_s = min(rate_s, self._limits.body_timeout_s)
        left_s = self._body_began + allowed_s - self.loop.time()
        if left_s > 0:
            self._read_timer = self.loop.call_later(left_s, self._time_body)
            return
        if not self.cycle.response_started:
            self._say(BODY_TOO_SLOW)
        self.transport.close()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _refuse(self, error: HttpError) -> None:
        """Answers below ASGI and closes. While another request is answered, nothing can be said."""
        if not self._answering():
            self._say(error)
        self.transport.close()

    def _say(self, error: HttpError) -> None:
        body = encode(error.body())
        retry = b"retry-after: 1\r\n" if error.status in (429, 503) else b""
        head = (
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n"
            b"%bconnection: close\r\n\r\n" % (len(body), retry)
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
