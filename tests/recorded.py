"""Spans that were ended, kept in memory for tests to look at."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from batonlm.rpc.otel import tracer_to


class _Watched(SimpleSpanProcessor):
    def __init__(self, kept: InMemorySpanExporter, still_open: dict[int, str]) -> None:
        super().__init__(kept)
        self._open = still_open

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._open[span.get_span_context().span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        del self._open[span.context.span_id]
        super().on_end(span)


class Recorded:
    """A tracer, and what it was given. share: of traces that begin here."""

    def __init__(self, role: str = "router", share: float = 1.0) -> None:
        self._kept = InMemorySpanExporter()
        self.open: dict[int, str] = {}
        """Names of those that began and did not end."""
        self.tracer = tracer_to(_Watched(self._kept, self.open), share, role, "i" * 32)

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
