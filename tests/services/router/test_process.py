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
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.cli.ports import free_ports
from batonlm.core.admission.api_keys import KeyBook, TenantLimits, render
from tests import leaks


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batonlm.router", *flags],
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
                alive = health.Check(health_pb2.HealthCheckRequest(), timeout=120)
                ready = health.Check(
                    health_pb2.HealthCheckRequest(service="baton.v1.Inference"), timeout=120
                )
            assert alive.status == health_pb2.HealthCheckResponse.SERVING
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
            try:
                urllib.request.urlopen(f"http://{said['http']}/health", timeout=120)
                raise AssertionError("ready without workers")
            except urllib.error.HTTPError as error:
                assert error.code == 503
                error.close()
            url = f"http://{said['http']}/metrics"
            with urllib.request.urlopen(url, timeout=120) as answer:
                told = answer.read().decode()
            assert "baton_requests_open 0.0" in told and leaks.held(told) == {}
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()


@pytest.mark.deep
def test_a_port_that_is_taken_is_named() -> None:
    with start() as first:
        assert first.stdout is not None
        try:
            taken = json.loads(first.stdout.readline())
            grpc_address = taken["grpc"]
            faces = {"http": taken["http"], "grpc": grpc_address, "health": grpc_address}
            for flag, address in {**faces, "metrics": grpc_address}.items():
                with start(f"--{flag}-listen", address) as second:
                    _, complaint = second.communicate(timeout=120)
                assert second.returncode == 2
                assert "in use" in complaint
                assert "Traceback" not in complaint
        finally:
            first.kill()


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.deep)])
def test_probes_and_scrapers_have_ports_of_their_own(processes: str) -> None:
    health, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    flags = ("--processes", processes, "--health-listen", health, "--metrics-listen", metrics)
    with start(*flags) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with grpc.insecure_channel(health) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                statuses = stub.List(health_pb2.HealthListRequest(), timeout=120).statuses
            serving = health_pb2.HealthCheckResponse.SERVING
            assert {name: it.status == serving for name, it in statuses.items()} == {
                "": True,
                "startup": True,
                "baton.v1.Inference": False,
                "baton.v1.Adapters": False,
            }
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=120) as answer:
                assert b"baton_requests_open 0.0" in answer.read()
        finally:
            process.kill()


def test_metrics_are_shown_to_an_operator_and_on_the_scrapers_port(tmp_path: Path) -> None:
    book, tenants = KeyBook().with_key("acme", TenantLimits(), "")
    book, staff = book.with_key("staff", TenantLimits(), "", operator=True)
    (tmp_path / "keys.json").write_text(render(book))
    (port,) = free_ports(1)
    scraped = f"127.0.0.1:{port}"
    flags = ("--keys", str(tmp_path / "keys.json"), "--metrics-listen", scraped)
    with start(*flags) as process:
        try:
            assert process.stdout is not None
            http = json.loads(process.stdout.readline())["http"]
            url = f"http://{http}/metrics"
            assert (status(url), status(url, key=tenants)) == (401, 403)
            shown = scrape_text(url, staff)
            whole = scrape_text(f"http://{scraped}/metrics", "")
            assert status(f"http://{scraped}/metrics", host="evil.example") == 421
            # A key is asked for: names need not be known.
            assert status(f"http://{http}/v1/models", host="any.example", key=tenants) == 200
        finally:
            process.kill()
    for text in (shown, whole):
        assert "baton_requests_total" in text and "baton_tenant_" in text


def test_without_keys_it_answers_under_its_own_names_and_those_it_was_given() -> None:
    with start("--allowed-hosts", "baton.example,*.lan") as process:
        try:
            assert process.stdout is not None
            http = json.loads(process.stdout.readline())["http"]
            url = f"http://{http}/v1/models"
            for host in ("", "localhost", "Baton.Example:80", "box.lan"):
                assert status(url, host=host) == 200, host
            for host in ("evil.example", "10.0.0.7:8000", "lan"):
                assert status(url, host=host) == 421, host
            assert status(f"http://{http}/health", host="10.0.0.7:8000") == 503
        finally:
            process.kill()


def test_a_name_that_is_none_is_refused_at_the_start() -> None:
    with start("--allowed-hosts", "http://baton.example") as process:
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 2 and "allowed" in complaint and "Traceback" not in complaint


def status(url: str, *, host: str = "", key: str = "") -> int:
    """host: instead of the URL's own."""
    headers = {"Host": host} if host else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=120
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def scrape_text(url: str, key: str) -> str:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(answer.read().decode())
