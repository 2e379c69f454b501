"""An OTLP receiver in a process of its own, which counts what it is sent.

Its processor time is nobody's who is measured. `do="open"` answers with its endpoint, anything else
with how many spans and traces came since the last time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from baton.cli.ports import HOST
from baton.rpc.loop import Loop
from baton.rpc.transport import bind
from baton_loadtest.bench.beside import answer


class Receiver(TraceServiceServicer):
    def __init__(self) -> None:
        self._spans = 0
        self._traces: set[bytes] = set()

    async def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self._spans += len(scope.spans)
                self._traces.update(span.trace_id for span in scope.spans)
        return ExportTraceServiceResponse()

    def take(self) -> dict[str, Any]:
        found = {"spans": self._spans, "traces": len(self._traces)}
        self._spans, self._traces = 0, set()
        return found


async def _main() -> None:
    receiver = Receiver()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    endpoint = f"http://{HOST}:{bind(server, f'{HOST}:0')}"
    await server.start()

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        return {"endpoint": endpoint} if command["do"] == "open" else receiver.take()

    try:
        await answer(handle)
    finally:
        await server.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(_main())
