"""What a public HTTP port bears: its limits, and how each refusal reads."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.router.api.http.errors import HttpError


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """All times are seconds."""

    max_connections: int = 4096
    """At a time. Further ones wait in the kernel's queue."""
    max_per_address: int = 1024
    """Connections from one address; 0: as many as there may be at all."""
    max_head_bytes: int = 16 << 10
    """Of a request's first line and headers; at least 8 KiB."""
    max_streams: int = 100
    """Requests at a time on one HTTP/2 connection."""
    head_timeout_s: float = 10.0
    """From a connection's beginning, or from a request's first byte, to the end of its headers."""
    body_timeout_s: float = 30.0
    """From the end of the headers to the end of the body."""
    body_start_s: float = 5.0
    """After so long, body_bytes_per_s counts."""
    body_bytes_per_s: float = 1024.0
    """At least so much of a body must come, on average."""
    stall_timeout_s: float = 30.0
    """How long a client may take nothing of what waits for it."""
    keep_alive_s: float = 75.0
    """Between two requests."""
    max_age_s: float = 300.0
    """An older connection ends with its next answer, varied by a tenth."""

    def age_s(self) -> float:
        """A connection's own greatest age: not all that came at once are to go at once."""
        return self.max_age_s * random.uniform(0.9, 1.1)


SEND_BUFFER_BYTES = 128 << 10
"""The kernel's, of one connection, which it doubles. Without it one that is not read takes
megabytes."""

BAD_HOST = HttpError(400, "one valid Host header is required", code="bad_request")
BAD_FRAMING = HttpError(400, "Transfer-Encoding must be chunked", code="bad_request")
BROKEN_BODY = HttpError(400, "the body is incomplete or malformed", code="bad_request")
BODY_TOO_SLOW = HttpError(408, "the body did not arrive in time", code="request_timeout")
TOO_MANY_OF_YOURS = HttpError(
    429, "too many connections from this address", code="too_many_connections"
)
