"""The router as a process: it says where it serves, answers health, and ends when told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.ports import free_ports
from baton.core.api_keys import KeyBook, Limits
from baton.core.key_document import render
from tests import leaks


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "baton.router", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_serves_before_there_are_workers_and_is_not_ready() -> None:
    with start() as process:
        assert process.stdout is not None
        try:
            said = json.loads(process.stdout.readline())
            assert said["role"] == "router"
            with grpc.insecure_channel(said["grpc"]) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                alive = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
                ready = health.Check(
                    health_pb2.HealthCheckRequest(service="baton.v1.Inference"), timeout=20
                )
            assert alive.status == health_pb2.HealthCheckResponse.SERVING
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
            try:
                urllib.request.urlopen(f"http://{said['http']}/health", timeout=20)
                raise AssertionError("ready without workers")
            except urllib.error.HTTPError as error:
                assert error.code == 503
                error.close()
            url = f"http://{said['http']}/metrics"
            with urllib.request.urlopen(url, timeout=20) as answer:
                told = answer.read().decode()
            assert "baton_requests_open 0.0" in told and leaks.held(told) == {}
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_named() -> None:
    with start() as first:
        assert first.stdout is not None
        try:
            taken = json.loads(first.stdout.readline())
            grpc_address = taken["grpc"]
            faces = {"http": taken["http"], "grpc": grpc_address, "health": grpc_address}
            for flag, address in {**faces, "metrics": grpc_address}.items():
                with start(f"--{flag}-listen", address) as second:
                    _, complaint = second.communicate(timeout=30)
                assert second.returncode == 2
                assert "in use" in complaint
                assert "Traceback" not in complaint
        finally:
            first.kill()


def test_probes_and_scrapers_have_ports_of_their_own() -> None:
    health, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    with start("--health-listen", health, "--metrics-listen", metrics) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with grpc.insecure_channel(health) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                statuses = stub.List(health_pb2.HealthListRequest(), timeout=20).statuses
            serving = health_pb2.HealthCheckResponse.SERVING
            assert {name: it.status == serving for name, it in statuses.items()} == {
                "": True,
                "startup": True,
                "baton.v1.Inference": False,
            }
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=20) as answer:
                assert b"baton_requests_open 0.0" in answer.read()
        finally:
            process.kill()


def test_a_tenants_key_shows_no_other_tenant(tmp_path: Path) -> None:
    """Any key opens /metrics of the HTTP port; what tells of tenants is on the scraper's alone."""
    book, key = KeyBook().with_key("acme", Limits(), "")
    (tmp_path / "keys.json").write_text(render(book))
    (port,) = free_ports(1)
    scraped = f"127.0.0.1:{port}"
    flags = ("--keys", str(tmp_path / "keys.json"), "--metrics-listen", scraped)
    with start(*flags) as process:
        try:
            assert process.stdout is not None
            http = json.loads(process.stdout.readline())["http"]
            shown = scrape_text(f"http://{http}/metrics", key)
            whole = scrape_text(f"http://{scraped}/metrics", "")
        finally:
            process.kill()
    assert "baton_requests_total" in shown and "baton_requests_total" in whole
    assert "baton_tenant_" not in shown and "baton_tenant_" in whole


def scrape_text(url: str, key: str) -> str:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return str(answer.read().decode())
