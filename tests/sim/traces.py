"""The spans of every process of a schedule, each start of one by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from batonlm.rpc.tracing import Tracer
from tests.recorded import Recorded, is_below

ABOVE = {
    "tokenizer.encode": ("tokenize", "turn"),
    "tokenizer.decode": ("turn",),
    "prefill.run": ("attempt",),
    "decode.run": ("attempt",),
    "prefill.queue": ("prefill.run",),
    "prefill.compute": ("prefill.run",),
    "handover.give": ("prefill.run", "decode.run"),
    "handover.collect": ("decode.run",),
    "decode.prefill": ("decode.run",),
    "decode.generate": ("decode.run",),
}
"""Where a span of a worker belongs; one that is not named belongs to the request itself."""


@dataclass
class Traces:
    """at: the newest process at an address."""

    processes: list[Recorded] = field(default_factory=list)
    at: dict[str, Recorded] = field(default_factory=dict)

    def start(self, address: str, role: str) -> Tracer:
        made = self.at[address] = Recorded(role)
        self.processes.append(made)
        return made.tracer

    @property
    def spans(self) -> list[ReadableSpan]:
        return [span for process in self.processes for span in process.spans]

    def faults(self) -> list[str]:
        """What is not as it should be of the requests that have ended."""
        by_id = {span.context.span_id: span for span in self.spans}
        lost = {span_id for process in self.processes for span_id in process.open}
        faults = []
        for span in self.spans:
            if span.parent is None:
                faults += self._uncovered(span)
                continue
            above = by_id.get(span.parent.span_id)
            if above is None:
                # It died with its process.
                if span.parent.span_id not in lost:
                    faults.append(f"{span.name} belongs to nothing")
            elif above.parent is not None and above.name not in ABOVE.get(span.name, ()):
                faults.append(f"{span.name} is below {above.name}")
        return faults

    def _uncovered(self, root: ReadableSpan) -> list[str]:
        stages = [
            span
            for span in self.at["router"].spans
            if is_below(span, root) and span.name != "attempt"
        ]
        edges = [root.start_time, *(stage.end_time for stage in stages)]
        begins = [stage.start_time for stage in stages]
        whole = begins == edges[:-1] and edges[-1] == root.end_time
        return [] if whole else [f"{root.name} is not covered by its stages"]
