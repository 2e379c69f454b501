"""The port for spans: what holds with and without somebody to send them to."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from batonlm.core.errors import Cancelled, Internal, InvalidArgument, Overloaded
from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.rpc.options import ProcessOptions, ServingOptions
from batonlm.rpc.tracing import (
    NO_SPAN,
    OFF,
    Kind,
    Span,
    Tracer,
    context_of,
    ending,
    error_type,
    metadata_of,
    now,
)
from tests.recorded import Recorded, is_below, seconds

THEIRS = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1")
UNSAMPLED = TraceContext(f"00-{'a' * 32}-{'b' * 16}-00")


@pytest.fixture(params=["off", "recorded", "unsampled"])
def tracer(request: pytest.FixtureRequest) -> Tracer:
    match request.param:
        case "off":
            return OFF
        case "recorded":
            return Recorded().tracer
        case _:
            return Recorded(share=0.0).tracer


@pytest.mark.parametrize("parent", [UNTRACED, THEIRS, UNSAMPLED, TraceContext("rubbish", "\n")])
def test_whatever_is_said_and_when_nothing_raises(tracer: Tracer, parent: TraceContext) -> None:
    for span in (tracer.begin("a", parent=parent), tracer.go_on("b", {"x": 1}, parent=parent)):
        assert isinstance(span.recording, bool)
        assert bool(span.context.traceparent) == span.recording
        child = span.child("c", {"y": ["z"]}, kind=Kind.CLIENT, at=now())
        assert child.recording == span.recording
        for each in (span, child):
            each.rename("d")
            each.set_attributes({"e": 0.5})
            each.event("f", at=now())
            each.end("internal", at=now())
        for each in (span, child):
            each.rename("g")
            each.set_attributes({"h": True})
            each.event("i")
            each.end()
            each.child("late").end()
    tracer.close()
    tracer.close()


def test_nobody_goes_on_with_no_trace(tracer: Tracer) -> None:
    assert tracer.go_on("a", parent=UNTRACED) is NO_SPAN
    assert tracer.go_on("a", parent=TraceContext("00-zz-1-01")) is NO_SPAN
    assert tracer.go_on("a", parent=UNSAMPLED) is NO_SPAN


def test_a_block_ends_its_span_on_every_way_out() -> None:
    recorded = Recorded()
    for failure in (None, Overloaded("x"), asyncio.CancelledError(), ValueError("secret")):
        try:
            with ending(recorded.tracer.begin("a")):
                if failure is not None:
                    raise failure
        except BaseException as error:
            assert error is failure
    told = [dict(span.attributes or {}).get("error.type", "") for span in recorded.spans]
    assert told == ["", "overloaded", "cancelled", "internal"]
    assert [span.status.is_ok for span in recorded.spans].count(False) == 2
    assert not any(span.events for span in recorded.spans)


def test_the_callers_trace_goes_on() -> None:
    recorded = Recorded(share=0.0)
    span = recorded.tracer.begin("a", parent=THEIRS)
    child = span.child("b")
    assert span.context.trace_id == child.context.trace_id == "a" * 32
    assert span.context.tracestate == "vendor=1"
    child.end()
    span.end()
    made = recorded.one("a")
    assert made.parent is not None and f"{made.parent.span_id:016x}" == "b" * 16
    assert is_below(recorded.one("b"), made)
    assert made.resource.attributes["service.name"] == "baton-router"
    assert made.resource.attributes["service.instance.id"] == "i" * 32


def test_times_are_those_that_are_given() -> None:
    recorded, began = Recorded(), now()
    span = recorded.tracer.begin("a", at=began)
    span.child("b", at=began + 1.0).end(at=began + 3.0)
    span.event("c", at=began + 2.0)
    span.end(at=began + 4.0)
    parent, child = recorded.one("a"), recorded.one("b")
    assert seconds(parent) == pytest.approx(4.0) and seconds(child) == pytest.approx(2.0)
    assert parent.start_time is not None and child.start_time is not None
    assert child.start_time - parent.start_time == pytest.approx(1e9)
    assert parent.events[0].timestamp - parent.start_time == pytest.approx(2e9)


def test_what_is_said_after_the_end_is_dropped() -> None:
    recorded = Recorded()
    span: Span = recorded.tracer.begin("a")
    span.end("overloaded")
    span.set_attributes({"late": 1})
    span.end()
    (made,) = recorded.spans
    assert dict(made.attributes or {}) == {"error.type": "overloaded"}


def test_a_failure_is_told_by_its_kind_alone() -> None:
    assert error_type(None) == ""
    assert error_type(InvalidArgument("secret")) == "invalid_argument"
    assert error_type(Cancelled("secret")) == "cancelled"
    assert error_type(Internal("secret")) == error_type(OSError("secret")) == "internal"


def test_headers_there_and_back() -> None:
    assert context_of(metadata_of(THEIRS)) == THEIRS
    assert metadata_of(UNTRACED) == ()
    assert context_of([("x-request-id", "1"), ("tracestate", "vendor=1")]) == UNTRACED
    twice = ("traceparent", THEIRS.traceparent)
    assert context_of([twice, twice]) == UNTRACED
    assert context_of([("traceparent", b"\xff")]).trace_id == ""


@pytest.mark.parametrize(
    "endpoint", ["x", "x:1", "ftp://x:1", "http://x", "http://:1", "http://[::1"]
)
def test_what_cannot_be_an_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ProcessOptions(otlp_endpoint=endpoint)
    assert refused.value.field == "otlp_endpoint"
    with pytest.raises(InvalidArgument):
        ServingOptions(otlp_endpoint=endpoint)


def test_off_loads_nothing() -> None:
    program = (
        "import sys; from batonlm.rpc.options import ProcessOptions; "
        "from batonlm.rpc.tracing import OFF; "
        "assert ProcessOptions().tracer('router', 'i') is OFF; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_is_not_installed_is_named() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None; "
        "from batonlm.rpc.options import ProcessOptions; "
        "ProcessOptions(otlp_endpoint='http://127.0.0.1:1').tracer('router', 'i')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert "pip install 'batonlm[otel]'" in done.stderr
