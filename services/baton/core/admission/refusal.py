"""Refusal, why a request is not let in.

It is an `Overloaded` with the name of the limit that was reached, for the metrics.
"""

from __future__ import annotations

from enum import Enum

from baton.core.errors import Overloaded


class Limit(Enum):
    """What was reached. The values are labels of `baton_refusals_total`."""

    REQUEST_RATE = "requests_per_minute"
    TOKEN_RATE = "tokens_per_minute"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    REQUESTS = "requests"
    TOKENS = "tokens"
    INPUT = "input"
    QUEUE = "queue"
    WAIT = "wait"
    KV = "kv"
    DEADLINE = "deadline"


class Refusal(Overloaded):
    """limit: which one. retry_after_s is set."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        limit: Limit = Limit.REQUESTS,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.limit = limit
