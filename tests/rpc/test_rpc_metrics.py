"""Metrics are served as Prometheus reads them, with gauges as they are at that moment."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from time import monotonic

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from batonlm.core.errors import InvalidArgument
from batonlm.core.observe.timings import Durations
from batonlm.rpc import metrics
from batonlm.rpc.address import PortInUse, split
from batonlm.rpc.metrics import MAX_CONNECTIONS, MetricsServer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = metrics.serve_metrics("127.0.0.1:0", registry)
    try:
        yield server
    finally:
        server.close()


def scrape(server: MetricsServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms(server: MetricsServer, registry: CollectorRegistry) -> None:
    metrics.counter(metrics.HANDOVERS, registry).labels("sender", "completed").inc(3)
    assert metrics.counter(metrics.HANDOVERS, registry) is metrics.counter(
        metrics.HANDOVERS, registry
    )
    metrics.histogram(metrics.STEP_TIME, registry).observe(0.003)
    found = scrape(server)
    labels = (("outcome", "completed"), ("side", "sender"))
    assert found["baton_handovers_total", labels] == 3
    assert found["baton_step_seconds_bucket", (("le", "0.005"),)] == 1
    assert found["baton_step_seconds_bucket", (("le", "0.0025"),)] == 0


def test_gauges_are_read_at_the_scrape_and_added_up(
    server: MetricsServer, registry: CollectorRegistry
) -> None:
    free: dict[tuple[str, ...], float] = {("free",): 5.0}
    stop = metrics.gauge(metrics.BLOCKS, lambda: free, registry)
    metrics.gauge(metrics.BLOCKS, lambda: {("free",): 1, ("used",): 2}, registry)
    metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): 9}, registry)
    assert scrape(server)["baton_blocks", (("state", "free"),)] == 6
    free["free",] = 7.0
    found = scrape(server)
    assert found["baton_blocks", (("state", "free"),)] == 8
    assert found["baton_blocks", (("state", "used"),)] == 2
    assert found["baton_waiting_tokens", ()] == 9
    stop()
    assert scrape(server)["baton_blocks", (("state", "free"),)] == 1


def test_timings_are_shown_as_a_histogram(
    server: MetricsServer, registry: CollectorRegistry
) -> None:
    times = Durations()
    stop = metrics.timings(metrics.HANDOVER_STAGE, lambda: {("sender", "pack"): times}, registry)
    for seconds in (0.0001, 0.0002, 0.3, 100.0):
        times.add(seconds)
    found = scrape(server)

    def at_most(bound: str) -> float:
        labels = (("le", bound), ("side", "sender"), ("stage", "pack"))
        return found["baton_handover_stage_seconds_bucket", labels]

    assert [at_most(b) for b in ("0.0001", "0.00025", "0.25", "0.5", "60.0")] == [1, 2, 2, 3, 3]
    labels = (("side", "sender"), ("stage", "pack"))
    assert at_most("+Inf") == found["baton_handover_stage_seconds_count", labels] == 4
    assert found["baton_handover_stage_seconds_sum", labels] == times.total_s
    stop()
    assert ("baton_handover_stage_seconds_count", labels) not in scrape(server)


def test_one_broken_gauge_hides_no_other(
    server: MetricsServer, registry: CollectorRegistry
) -> None:
    def broken() -> dict[tuple[str, ...], float]:
        raise RuntimeError

    metrics.gauge(metrics.BLOCKS, broken, registry)
    metrics.gauge(metrics.SEQUENCES, lambda: {("running",): 4}, registry)
    assert scrape(server)["baton_sequences", (("state", "running"),)] == 4


def test_head_has_no_body_and_other_paths_are_not_found(server: MetricsServer) -> None:
    head = urllib.request.Request(f"http://{server.address}/metrics", method="HEAD")
    with urllib.request.urlopen(head, timeout=120) as answer:
        assert (answer.status, answer.read()) == (200, b"")
        assert int(answer.headers["Content-Length"]) >= 0
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        urllib.request.urlopen(f"http://{server.address}/", timeout=120)
    missing.value.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("localhost:1", 200), ("evil.example", 421), ("10.0.0.7:80", 421)],
)
def test_on_loopback_only_this_machines_names_are_answered(
    server: MetricsServer, registry: CollectorRegistry, host: str, status: int
) -> None:
    metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): 1}, registry)
    connection = http.client.HTTPConnection(server.address, timeout=120)
    try:
        connection.request("GET", "/metrics", headers={"Host": host})
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"baton_" in answer.read()) == (status == 200)
    finally:
        connection.close()


def test_more_connections_than_there_is_room_for_are_closed(
    server: MetricsServer, registry: CollectorRegistry
) -> None:
    metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): 1}, registry)
    with ExitStack() as held:
        crowd = [
            held.enter_context(socket.create_connection(split(server.address, ""), 20))
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        # They are accepted in their order, and none of them says anything.
        assert crowd[-1].recv(1) == b""
    until = monotonic() + 120
    while monotonic() < until:
        with suppress(OSError, http.client.HTTPException):
            assert scrape(server)["baton_waiting_tokens", ()] == 1
            return
    raise AssertionError("those that left still take the room")


def test_a_silent_client_stops_nobody(server: MetricsServer, registry: CollectorRegistry) -> None:
    metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): 1}, registry)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))), ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: scrape(server), range(8)):
            assert found["baton_waiting_tokens", ()] == 1


def test_the_port_is_free_again_after_close() -> None:
    server = metrics.serve_metrics("127.0.0.1:0", CollectorRegistry())
    with pytest.raises(PortInUse) as refused:
        metrics.serve_metrics(server.address)
    assert refused.value.field == "metrics_listen"
    server.close()
    metrics.serve_metrics(server.address).close()
    with pytest.raises(InvalidArgument):
        metrics.serve_metrics("nowhere")


def test_a_process_reports_itself() -> None:
    server = metrics.serve_metrics("127.0.0.1:0")
    try:
        assert scrape(server)["process_resident_memory_bytes", ()] > 0
    finally:
        server.close()


def test_names_follow_the_rules() -> None:
    specs = [spec for spec in vars(metrics).values() if isinstance(spec, metrics.Spec)]
    specs = [spec for spec in specs if not spec.name.startswith("vllm:")]
    assert len({spec.name for spec in specs}) == len(specs) > 20
    for spec in specs:
        assert re.fullmatch(r"baton_[a-z_]+", spec.name)
        assert spec.help.endswith(".")
        happens_once = spec in (metrics.READY, metrics.STARTUP)
        counts = spec in (metrics.STEP_TOKENS, metrics.STEP_SEQUENCES)
        timed = (bool(spec.buckets) and not counts) or happens_once
        assert timed == spec.name.endswith("_seconds")
        assert list(spec.buckets) == sorted(spec.buckets)
