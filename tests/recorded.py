"""Spans that were ended, kept in memory for tests to look at."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.rpc.otel import tracer_to


class Recorded:
    """A tracer, and what it was given. share: of traces that begin here."""

    def __init__(self, role: str = "router", share: float = 1.0) -> None:
        self._kept = InMemorySpanExporter()
        self.tracer = tracer_to(SimpleSpanProcessor(self._kept), share, role, "i" * 32)

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self._kept.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, *names: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name in names]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def is_below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.parent.trace_id == parent.context.trace_id
    )
