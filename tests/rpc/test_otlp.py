"""Spans on their way out of a process: to a receiver, to none, and to one that is not there."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from batonlm.cli.ports import free_ports
from batonlm.core.observe.stages import TraceContext
from batonlm.rpc import otel
from batonlm.rpc.options import ProcessOptions
from batonlm.rpc.otel import SAY_EVERY_S, OtelLogs, otlp_tracer
from batonlm.rpc.tracing import OFF, Kind
from tests.receiver import receiver

PATIENCE_S = 120.0
INSTANCE_ID = "0123456789abcdef" * 2
THEIRS = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A thread that sends, or tries to, would disturb the tests that follow."""
    _all_sent()
    yield
    _all_sent()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver on a busy machine takes its time."""
    monkeypatch.setattr(otel, "CLOSE_S", PATIENCE_S)


@pytest.mark.deep
def test_a_receiver_gets_what_was_told(patient: None) -> None:
    with receiver() as there:
        tracer = ProcessOptions(otlp_endpoint=there.endpoint).tracer("decode", INSTANCE_ID)
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
    assert {(each.service, each.instance_id) for each in spans} == {("baton-decode", INSTANCE_ID)}
    assert parent.attributes == {"number": 1}
    assert child.attributes == {"list": ("x", "y"), "share": 0.5, "error.type": "overloaded"}
    assert [event.name for event in child.span.events] == ["c"]
    assert child.span.kind == child.span.SPAN_KIND_CLIENT
    assert child.span.status.code == child.span.status.STATUS_CODE_ERROR


def test_what_is_left_goes_out_at_the_end(patient: None) -> None:
    with receiver() as there:
        tracer = otlp_tracer(there.endpoint, 1.0, "router", INSTANCE_ID)
        for _ in range(100):
            tracer.begin("a").end()
        tracer.close()
        assert len(there.spans) == 100


@pytest.fixture
def nobody() -> Iterator[str]:
    """An endpoint whose port nobody listens on."""
    (port,) = free_ports(1)
    yield f"http://127.0.0.1:{port}"


@pytest.fixture
def mute() -> Iterator[str]:
    """An endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.deep
@pytest.mark.parametrize("who", ["nobody", "mute"])
def test_nobody_there_holds_nobody_up(who: str, request: pytest.FixtureRequest) -> None:
    tracer = otlp_tracer(request.getfixturevalue(who), 1.0, "router", INSTANCE_ID)
    for _ in range(20_000):
        tracer.begin("a").end()
    tracer.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("header", "trouble"),
    [
        ("authorization=hush", "the OTLP endpoint takes no spans"),
        ("hush", "a header for the OTLP endpoint is not name=value, and is left out"),
        ("authorization=hush%0Ahush", "the OTLP endpoint takes no spans"),
    ],
)
def test_a_process_says_it_once_and_without_keys(nobody: str, header: str, trouble: str) -> None:
    program = (
        "from batonlm.rpc import logs; from batonlm.rpc.otel import otlp_tracer\n"
        "logs.setup('router', 'debug')\n"
        f"tracer = otlp_tracer({nobody!r}, 1.0, 'router', 'i')\n"
        "for _ in range(20_000): tracer.begin('a').end()\n"
        "tracer.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env=os.environ | {"OTEL_EXPORTER_OTLP_HEADERS": header},
    )
    # gRPC's own lines about a bad header come beside them.
    said = [line for line in done.stderr.splitlines() if " router " in line]
    assert sum(trouble in line for line in said) == 1
    assert len(said) <= 3 and all(" WARNING router " in line for line in said)
    assert "hush" not in done.stderr


def test_trouble_is_told_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    handler = OtelLogs(lambda: now)

    def record(level: int = logging.ERROR) -> logging.LogRecord:
        name = "opentelemetry.exporter.otlp"
        args = (grpc.StatusCode.UNAVAILABLE, "hush")
        return logging.LogRecord(name, level, "", 0, "%s %s", args, None)

    handler.handle(record())
    for _ in range(5):
        handler.handle(record())
    now = SAY_EVERY_S
    handler.handle(record())
    first, second = map(vars, caplog.records)
    assert first["error"] == second["error"] == "unavailable"
    assert "unsaid" not in first and second["unsaid"] == 5


def test_no_more_than_its_share(patient: None) -> None:
    with receiver() as there:
        tracer = otlp_tracer(there.endpoint, 0.0, "router", INSTANCE_ID)
        tracer.begin("mine").end()
        tracer.begin("theirs", parent=THEIRS).end()
        tracer.close()
        assert [span.name for span in there.spans] == ["theirs"]


def _all_sent() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while _sending():
        assert time.monotonic() < deadline, _sending()
        time.sleep(0.01)


def _sending() -> list[str]:
    """The threads that send spans, or wait to."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("Otel", "otlp"))]
