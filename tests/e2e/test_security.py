"""A whole Baton with TLS on every hop and with API keys, as real processes."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.cli.ports import free_ports
from batonlm.rpc.peers import DOCTOR, ROLES
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests.e2e.relay import PATIENCE_S, Relay, eventually, until_it_comes_about

PROMPT = "hello " * 60
"""Long enough to be prefilled on the prefill worker."""


@pytest.mark.deep
def test_up_with_tls_and_keys_answers_who_has_one_and_nobody_else(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1"}
    environment.pop("BATON_API_KEY", None)

    def baton(*words: str, key: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batonlm.cli.main", *words],
            env=environment | ({"BATON_API_KEY": key} if key else {}),
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    keys = str(tmp_path / "keys.json")
    key = baton("keys", "new", "--tenant", "acme", "--operator", keys).stdout.strip()
    http_port, grpc_port = free_ports(2)
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    fake = ("--runner", "fake", "--transport", "loopback")
    started = baton("up", "--detach", "--tls", "--keys", keys, *ports, *fake)
    log = tmp_path / "baton" / "up.log"
    assert started.returncode == 0, started.stderr + (log.read_text() if log.exists() else "")
    try:
        said = json.loads(started.stdout)
        assert said["http"].startswith("https://")
        answered = baton("chat", "--max-tokens", "4", PROMPT, key=key)
        assert answered.returncode == 0, answered.stderr
        assert answered.stdout.strip()
        refused = baton("chat", PROMPT)
        assert refused.returncode == 1
        assert "API key" in refused.stderr

        def refuses(request: urllib.request.Request) -> bool:
            try:
                urllib.request.urlopen(request, context=trust, timeout=120).close()
            except urllib.error.HTTPError as error:
                error.close()
                return error.code == 401
            return False

        trust = ssl.create_default_context(cafile=said["ca"])
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{said['http']}/v1/models", context=trust, timeout=120)
        assert caught.value.code == 401
        caught.value.close()
        wanted = urllib.request.Request(
            f"{said['http']}/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(wanted, context=trust, timeout=120) as models:
            assert json.load(models)["data"]

        # KV really went from prefill to decode, under both their certificates.
        metrics = f"{said['http']}/metrics"
        shown = urllib.request.Request(metrics, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(shown, context=trust, timeout=120) as read:
            assert b"baton_remote_prefill_total 1.0" in read.read()
        # They need a key, like all else, which `baton top` does without on this machine.
        assert refuses(urllib.request.Request(metrics))

        def all_are_read() -> bool:
            watched = baton("top", "--json", "--interval", "0.1")
            assert watched.returncode == 0, watched.stderr
            shown = json.loads(watched.stdout)
            # On a busy machine one may not answer in time.
            assert set(shown["away"].values()) <= {"does not answer"}
            return all(pool["asked"] for pool in shown["pools"])

        until_it_comes_about(all_are_read, "all processes answer `baton top`")

        # No worker answers who shows no certificate, in plain text or not.
        root = grpc.ssl_channel_credentials(Path(said["ca"]).read_bytes())
        for process in said["processes"]:
            if process["role"] == "router":
                continue
            name = (("grpc.ssl_target_name_override", f"{process['role']}.baton.internal"),)
            for channel in (
                grpc.insecure_channel(process["grpc"]),
                grpc.secure_channel(process["grpc"], root, options=name),
            ):
                with channel, pytest.raises(grpc.RpcError):
                    health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=120
                    )
        (key_id,) = (line.split()[0] for line in baton("keys", "list", keys).stdout.splitlines())
        assert baton("keys", "remove", key_id, keys).returncode == 0
        eventually(lambda: refuses(wanted), PATIENCE_S, "the removed key opens nothing")
        token = json.loads((tmp_path / "baton" / "up.json").read_text())["token"]
        assert token and token not in started.stdout + started.stderr
        for secret in (key, key.removeprefix("baton-"), token):
            assert secret not in log.read_text()
    finally:
        stopped = baton("down")
    assert stopped.returncode == 0, stopped.stderr
    assert not list((tmp_path / "baton").glob("tls-*")), "the CA was thrown away"


def test_without_tls_workers_answer_batons_own_processes_only(relay: Relay) -> None:
    workers = [process for process in relay.processes() if process["role"] != "router"]
    assert {process["role"] for process in workers} == ROLES - {"router", "encode", DOCTOR}
    for process in workers:
        with grpc.insecure_channel(process["grpc"]) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                next(WorkerStub(channel).Watch(worker_pb2.WatchRequest(), timeout=120))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=120
            )
        with relay.channel_to(process) as channel:
            first = next(WorkerStub(channel).Watch(worker_pb2.WatchRequest(), timeout=120))
            assert first.description.identity.role == process["role"]
        # Nor can another user see the token: command lines are everybody's.
        token = json.loads(relay.state_file.read_text())["token"]
        command = Path(f"/proc/{process['pid']}/cmdline").read_bytes()
        assert token.encode() not in command
