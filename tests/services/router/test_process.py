"""The router as a process: it says where it serves, answers health, and ends when told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


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
                assert b"baton_requests_open 0.0" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_named() -> None:
    with start() as first:
        assert first.stdout is not None
        try:
            taken = json.loads(first.stdout.readline())
            for flag, address in (("http", taken["http"]), ("grpc", taken["grpc"])):
                with start(f"--{flag}-listen", address) as second:
                    _, complaint = second.communicate(timeout=30)
                assert second.returncode == 2
                assert "in use" in complaint
                assert "Traceback" not in complaint
        finally:
            first.kill()
