"""How long a gRPC caller waits, as a request's deadline."""

from __future__ import annotations

from typing import Any

import grpc

from baton.core.errors import DeadlineExceeded
from baton.core.request.validation import REQUEST_RANGES


def deadline_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Time left for the call, or None; no more than a request may name. Raises DeadlineExceeded."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    if remaining_s <= 0:
        raise DeadlineExceeded("The request ran out of time.")
    return min(float(remaining_s), REQUEST_RANGES["deadline_s"].high)
