"""uvicorn's HTTP/1.1 protocol with the limits that a public port needs.

A head that is too large or too slow, a client that does not read, pipelined requests and more
connections than allowed end here, below any application code. All refusals are JSON error bodies.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.router.http.errors import HttpError
from baton.router.http.respond import encode


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """head_timeout_s: from the first byte of a request (or the connection) to the end of its
    headers. stall_timeout_s: how long a client may leave a full socket buffer unread."""

    max_connections: int = 4096
    max_head_bytes: int = 16 << 10
    head_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    keep_alive_s: int = 75


# uvicorn warns of every malformed request, so anyone could fill the log; and it reports the
# cancelled tasks of a shutdown as errors. The app logs its own failures.
_quiet = logging.getLogger("baton.router.http.protocol")
_quiet.setLevel(logging.CRITICAL)

_NOT_HTTP = HttpError(400, "this is not a valid HTTP request", code="bad_request")
_HEAD_TOO_LARGE = HttpError(431, "the headers are too large", code="headers_too_large")
_HEAD_TOO_SLOW = HttpError(408, "the headers did not arrive in time", code="request_timeout")
_TOO_MANY = HttpError(503, "too many connections", code="too_many_connections")


class _Refused(Exception):
    """Stops the parser; it comes back as a parser error."""


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, limits: HttpLimits, **options: Any):
        super().__init__(**options)
        self.logger = _quiet
        self.access_log = False
        self._limits = limits
        self._in_head = True
        self._head_bytes = 0
        self._refusal = _NOT_HTTP
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(_TOO_MANY)
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._head_timer)
        self._stop(self._stall_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        super().data_received(data)
        # A single endless header never reaches on_header; count it as it arrives.
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop(self._head_timer)
        self._head_timer = None
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_head_bytes:
            self._refusal = _HEAD_TOO_LARGE
            raise _Refused
        if self._answering():
            # uvicorn would queue a pipelined request and stop reading, and so miss that the client
            # left. The running answer is the connection's last instead: clients then send again.
            self.cycle.keep_alive = False
            self._deaf = True
            raise _Refused
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever stopped the parser; its own text is not sent."""
        if not self._deaf:
            self._refuse(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self._limits.stall_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._stall_timer)
        self._stall_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        """A client that sent nothing at all gets no answer either: it asked nothing."""
        if self._head_bytes:
            self._refuse(_HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        """Answers below ASGI and closes. Mid-response there is nothing left to say."""
        if not self._answering():
            body = encode(error.body())
            head = (
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n"
                b"connection: close\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
