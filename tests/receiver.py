"""An OTLP receiver: takes real exports over gRPC, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    """A span, and the process that made it."""

    span: Span
    service: str
    instance_id: str

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, object]:
        return _read(self.span.attributes)

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def is_below(self, parent: Received) -> bool:
        mine = (self.span.trace_id, self.span.parent_span_id)
        return mine == (parent.span.trace_id, parent.span.span_id)


@dataclass
class Receiver(TraceServiceServicer):
    """endpoint: where it listens."""

    endpoint: str = ""
    _spans: list[Received] = field(default_factory=list)
    _came: threading.Condition = field(default_factory=threading.Condition)

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        with self._came:
            for resource in request.resource_spans:
                who = _read(resource.resource.attributes)
                service, instance_id = str(who["service.name"]), str(who["service.instance.id"])
                self._spans += [
                    Received(span, service, instance_id)
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            self._came.notify_all()
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        """In the order in which they began."""
        with self._came:
            return sorted(self._spans, key=lambda each: each.span.start_time_unix_nano)

    def wait_for(self, there: Callable[[list[Received]], bool], timeout_s: float) -> list[Received]:
        """The spans, as soon as what is looked for is among them."""
        with self._came:
            found = self._came.wait_for(lambda: there(self._spans), timeout_s)
        assert found, sorted(each.name for each in self.spans)
        return self.spans


@contextmanager
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(0).wait()


def _read(attributes: Iterable[KeyValue]) -> dict[str, object]:
    """Plain values by key; lists as tuples."""
    found: dict[str, object] = {}
    for entry in attributes:
        kind = str(entry.value.WhichOneof("value"))
        value = getattr(entry.value, kind)
        if kind == "array_value":
            value = tuple(item.string_value for item in value.values)
        found[entry.key] = value
    return found
