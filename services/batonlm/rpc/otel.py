"""Exports spans over OTLP. This is the only module that imports OpenTelemetry.

It is imported only when an endpoint is configured. The exporter reads OpenTelemetry's own variables
for the endpoint (OTEL_EXPORTER_OTLP_HEADERS, …_CERTIFICATE).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.rpc.tracing import (
    ERROR_TYPE,
    NO_SPAN,
    NOT_OURS,
    NOTHING,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    Kind,
    Span,
    Tracer,
    Value,
    now,
)

log = logging.getLogger(__name__)

EXPORT_EVERY_S = 5.0
"""Export interval: a killed process loses the spans of at most so long. This is OpenTelemetry's
default; a message costs 1.6 ms of processor time, however few spans it holds."""
EXPORT_TIMEOUT_S = 5.0
MAX_WAITING_SPANS = 8192
"""Spans kept while the endpoint is unreachable. Newer ones replace older ones."""
CLOSE_S = 2.0
"""How long a process that ends tries to send its remaining spans."""
GIVE_UP_S = 1.0
"""How long it then waits for an aborted export to end, which takes milliseconds."""

_KINDS = {
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
}
_HEADERS = TraceContextTextMapPropagator()


def otlp_tracer(endpoint: str, sample_share: float, role: str, instance_id: str) -> OtelTracer:
    """A tracer that exports to an OTLP endpoint over gRPC, in the background."""
    take_over()
    processor = _Sending(
        OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S),
        max_queue_size=MAX_WAITING_SPANS,
        schedule_delay_millis=EXPORT_EVERY_S * 1000,
    )
    return tracer_to(processor, sample_share, role, instance_id)


def tracer_to(
    processor: SpanProcessor, sample_share: float, role: str, instance_id: str
) -> OtelTracer:
    """A tracer that hands ended spans to a processor. sample_share: the share of traces that begin
    in this process and are recorded, from 0 to 1."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_share)),
        resource=_Process(
            Resource.create(
                {SERVICE_NAME: f"baton-{role}", SERVICE_INSTANCE_ID: instance_id}
            ).attributes
        ),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return OtelTracer(provider)


class _Process(Resource):
    """The resource of all spans of a process, compared and hashed by identity. The exporter hashes
    it once per span to group a batch, and the library's own hash serializes it to JSON each
    time."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class OtelTracer(Tracer):
    """The recording implementation of `Tracer`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton")

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext = UNTRACED,
        at: float | None = None,
    ) -> Span:
        carrier = {field: value for field, value in parent._asdict().items() if value}
        return _begun(
            self._tracer,
            time.time_ns() - _ns(now()),
            name,
            attributes,
            _HEADERS.extract(carrier, Context()),
            Kind.SERVER,
            at,
        )

    def close(self) -> None:
        self._provider.shutdown()


class _Sending(BatchSpanProcessor):
    """A batch processor whose shutdown is bounded, even when the endpoint is unreachable."""

    def shutdown(self) -> None:
        """Returns within CLOSE_S + GIVE_UP_S."""
        closing = threading.Thread(target=super().shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            # Aborts a running export and its retry delay. The remaining batches then fail at once.
            self.span_exporter.shutdown()
            closing.join(GIVE_UP_S)


class OtelSpan(Span):
    """The recording implementation of `Span`. epoch_ns: the wall-clock time at which `now` is 0, in
    ns. A span's children share it, so that their times stay consistent when the wall clock is
    changed."""

    recording = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, epoch_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns
        self._ended = False
        self._context: TraceContext | None = None

    @property
    def context(self) -> TraceContext:
        # Computed on demand: most spans have no child in another process.
        if self._context is None:
            carrier: dict[str, str] = {}
            _HEADERS.inject(carrier, trace.set_span_in_context(self._span))
            self._context = TraceContext(**carrier)
        return self._context

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        kind: Kind = Kind.INTERNAL,
        at: float | None = None,
    ) -> Span:
        parent = trace.set_span_in_context(self._span)
        return _begun(self._tracer, self._epoch_ns, name, attributes, parent, kind, at)

    def rename(self, name: str) -> None:
        if not self._ended:
            self._span.update_name(name)

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        if not self._ended:
            self._span.set_attributes(attributes)

    def event(self, name: str, *, at: float | None = None) -> None:
        if not self._ended:
            self._span.add_event(name, timestamp=_wall(self._epoch_ns, at))

    def end(self, error: str = "", *, at: float | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            if error not in NOT_OURS:
                self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(_wall(self._epoch_ns, at))


def _begun(
    tracer: trace.Tracer,
    epoch_ns: int,
    name: str,
    attributes: Mapping[str, Value],
    parent: Context,
    kind: Kind,
    at: float | None,
) -> Span:
    span = tracer.start_span(name, parent, _KINDS[kind], attributes, start_time=_wall(epoch_ns, at))
    return OtelSpan(tracer, span, epoch_ns) if span.is_recording() else NO_SPAN


def _wall(epoch_ns: int, at: float | None) -> int:
    return epoch_ns + _ns(now() if at is None else at)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


SAY_EVERY_S = 60.0
"""Interval between log lines about one kind of trouble; each counts the lines left out since."""

_TROUBLES = {
    "opentelemetry.exporter": "the OTLP endpoint takes no spans",
    "opentelemetry.util.re": "a header for the OTLP endpoint is not name=value, and is left out",
}
_OTHER_TROUBLE = "OpenTelemetry may lose spans"


class OtelLogs(logging.Handler):
    """Rewrites OpenTelemetry's records of WARNING and above, rate-limited, without their texts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        trouble = next(
            (text for name, text in _TROUBLES.items() if record.name.startswith(name)),
            _OTHER_TROUBLE,
        )
        now = self._clock()
        if trouble in self._logged_at and now - self._logged_at[trouble] < SAY_EVERY_S:
            self._num_left_out[trouble] = self._num_left_out.get(trouble, 0) + 1
            return
        self._logged_at[trouble] = now
        extra: dict[str, object] = {"source": record.name}
        if kind := _kind(record):
            extra["error"] = kind
        if left_out := self._num_left_out.pop(trouble, 0):
            extra["unsaid"] = left_out
        log.warning("%s", trouble, extra=extra)


def take_over() -> None:
    """Routes OpenTelemetry's log records to OtelLogs only. Idempotent."""
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, OtelLogs) for handler in theirs.handlers):
        theirs.handlers = [OtelLogs()]
        theirs.propagate = False


def _kind(record: logging.LogRecord) -> str:
    """The record's error in one word (a gRPC code or an exception's class), never its text."""
    args = record.args if isinstance(record.args, tuple) else ()
    for arg in args:
        if isinstance(arg, grpc.StatusCode):
            return arg.name.lower()
    return record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
