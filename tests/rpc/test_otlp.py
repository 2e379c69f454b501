"""Spans on their way out of a process: to a receiver, to none, and to one that is not there."""

from __future__ import annotations

from baton.cli.ports import free_ports
from baton.core.trace_context import TraceContext
from baton.rpc.otel import otlp_tracer
from baton.rpc.process_options import ProcessOptions
from baton.rpc.tracing import OFF, Kind
from tests.receiver import receiver

PATIENCE_S = 30.0
INCARNATION = "0123456789abcdef" * 2
THEIRS = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


def test_a_receiver_gets_what_was_told() -> None:
    with receiver() as there:
        tracer = ProcessOptions(otlp_endpoint=there.endpoint).tracer("decode", INCARNATION)
        assert tracer is not OFF
        root = tracer.begin("a", {"number": 1}, parent=THEIRS)
        part = root.child("b", {"list": ["x", "y"], "share": 0.5}, kind=Kind.CLIENT)
        part.event("c")
        part.end("overloaded")
        root.end()
        spans = there.wait_for(lambda spans: len(spans) == 2, PATIENCE_S)
        tracer.close()
    parent, child = spans
    assert (parent.name, child.name) == ("a", "b") and child.is_below(parent)
    assert parent.span.trace_id.hex() == "a" * 32
    assert parent.span.parent_span_id.hex() == "b" * 16
    assert {(each.service, each.incarnation) for each in spans} == {("baton-decode", INCARNATION)}
    assert parent.attributes == {"number": 1}
    assert child.attributes == {"list": ("x", "y"), "share": 0.5, "error.type": "overloaded"}
    assert [event.name for event in child.span.events] == ["c"]
    assert child.span.kind == child.span.SPAN_KIND_CLIENT
    assert child.span.status.code == child.span.status.STATUS_CODE_ERROR


def test_what_is_left_goes_out_at_the_end() -> None:
    with receiver() as there:
        tracer = otlp_tracer(there.endpoint, 1.0, "router", INCARNATION)
        for _ in range(100):
            tracer.begin("a").end()
        tracer.close()
        assert len(there.spans) == 100


def test_nobody_there_holds_nobody_up() -> None:
    (port,) = free_ports(1)
    tracer = otlp_tracer(f"http://127.0.0.1:{port}", 1.0, "router", INCARNATION)
    for _ in range(20_000):
        tracer.begin("a").end()
    tracer.close()


def test_no_more_than_its_share() -> None:
    with receiver() as there:
        tracer = otlp_tracer(there.endpoint, 0.0, "router", INCARNATION)
        tracer.begin("mine").end()
        tracer.begin("theirs", parent=THEIRS).end()
        tracer.close()
        assert [span.name for span in there.spans] == ["theirs"]
