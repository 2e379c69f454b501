"""What the trace of a request tells of one attempt at a decode worker.

Its KV comes, or is computed here, and then its tokens: two spans that follow each other, below one
that lasts as long as the attempt is here. Nothing is said once per token.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from baton.core.observe.trace_context import TraceContext
from baton.core.request.attempt import Attempt
from baton.rpc import trace_names as names
from baton.rpc.tracing import Span, Tracer, ending, error_type


class AttemptTrace:
    """collects: its KV is another worker's. Every method returns at once."""

    def __init__(self, tracer: Tracer, attempt: Attempt, *, collects: bool) -> None:
        self._span = tracer.go_on(names.DECODE_RUN, parent=TraceContext(attempt.traceparent))
        self._part = self._span.child(names.COLLECT if collects else names.DECODE_PREFILL)

    @property
    def trace_id(self) -> str:
        return self._span.context.trace_id

    def kv_ready(self, cached_tokens: int, received_bytes: int) -> None:
        if not self._span.recording:
            return
        self._part.tell({names.WORKER_CACHED_TOKENS: cached_tokens, names.KV_BYTES: received_bytes})
        self._part.end()
        self._part = self._span.child(names.GENERATE)

    def giving(self) -> AbstractContextManager[Span]:
        """While one of its sequences is on offer to another worker."""
        return ending(self._span.child(names.GIVE))

    def gone(self, error: BaseException | None) -> None:
        """It is here no more."""
        self._part.end(error_type(error))
        self._span.end(error_type(error))
