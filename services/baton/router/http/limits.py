"""What a public HTTP port bears: the limits, who is connected, and how each refusal reads."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from baton.router.http.errors import HttpError


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """max_per_address: connections from one address; 0: as many as there may be at all.
    head_timeout_s: from the first byte of a request (or the connection) to the end of its headers.
    body_timeout_s: from there to the end of its body, of which at least body_bytes_per_s must come
    on average after the first BODY_START_S. stall_timeout_s: how long a client may take nothing of
    what waits for it. keep_alive_s: between two requests. max_age_s: an older connection ends with
    the answer it is at, varied by a tenth.
    """

    max_connections: int = 4096
    max_per_address: int = 1024
    max_head_bytes: int = 16 << 10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    max_age_s: float = 300.0

    def age_s(self) -> float:
        """A connection's own greatest age: not all that came at once are to go at once."""
        return self.max_age_s * random.uniform(0.9, 1.1)


BODY_START_S = 5.0

SEND_BUFFER_BYTES = 128 << 10
"""The kernel's, of one connection, which it doubles. Without it one that is not read takes
megabytes."""


@dataclass(slots=True)
class Connected:
    """All connections of one server. leaving: every answer that begins says that it is its
    connection's last; ending: a connection ends with its answer, whatever that one said.
    """

    leaving: bool = False
    ending: bool = False
    by_address: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> None:
        self.by_address[address] += 1

    def leave(self, address: str) -> None:
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


NOT_HTTP = HttpError(400, "this is not a valid HTTP request", code="bad_request")
HEAD_TOO_LARGE = HttpError(431, "the headers are too large", code="headers_too_large")
HEAD_TOO_SLOW = HttpError(408, "the headers did not arrive in time", code="request_timeout")
BODY_TOO_SLOW = HttpError(408, "the body did not arrive in time", code="request_timeout")
TOO_MANY = HttpError(503, "too many connections", code="too_many_connections")
TOO_MANY_OF_YOURS = HttpError(
    429, "too many connections from this address", code="too_many_connections"
)
