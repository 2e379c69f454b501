"""`baton doctor kv` between real processes over NIXL: what works, and each way it does not."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from batonlm.cli import doctor
from batonlm.core.errors import InvalidArgument
from tests.cli.test_chat import serving
from tests.nobody import nobody
from tests.services.router_http.scripted import Scripted

PEER = "10.77.0.1:7001"
TCP = ("--kv-network", "isolated", "--ucx-transports", "tcp,self", "--ucx-devices", "lo")


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", "kv", *argv])


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and findings by name with the figures as `kv`."""
    code = doctor.run(parsed("--json", *argv))
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    return code, {check["name"]: check for check in report["checks"]} | {"kv": report["kv"]}


@contextmanager
def started(*command: str, prefix: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """What a process announces, where it listens, and its `pid`."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "it did not start"
        yield json.loads(line) | {"pid": process.pid}
    finally:
        process.kill()
        process.communicate()


@contextmanager
def listening(*flags: str) -> Iterator[tuple[int, str]]:
    """Process id and address."""
    with started(
        "batonlm.cli.main", "doctor", "kv", "--json", "--listen", "127.0.0.1:0", *flags
    ) as process:
        yield process["pid"], process["listen"]


@pytest.mark.deep
def test_over_tcp(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(*TCP) as (_, address):
        code, found = asked(capsys, "--peer", address, *TCP)
    assert code == 0, found
    figures = found["kv"]
    assert figures["way"]["transport"] == "tcp" and figures["way"]["device"] == "lo"
    assert figures["meeting"]["digest"] == "poly61"
    assert figures["kv_chunks"]["count"] == 8 and figures["kv_chunks"]["bytes"] > 3 << 20
    assert [read["bytes_per_s"] > 0 for read in figures["reads"]] == [True] * 3
    assert figures["round_trip_s"] > 0 and figures["memcpy_bytes_per_s"] > 0
    assert "tcp on lo" in found["transport"]["detail"]


@pytest.mark.deep
def test_a_worker_that_serves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By shared memory, as on one machine, and the worker has done no hand-over by it."""
    flags = ("prefill", "--model", str(tmp_path), "--transport", "nixl")
    with started("batonlm.testing.worker", *flags, "--metrics-listen", "127.0.0.1:0") as worker:
        code, found = asked(capsys, "--peer", worker["listen"], "--transport", "nixl")
        with urlopen(f"http://{worker['metrics']}/metrics", timeout=120) as answer:
            lines = answer.read().decode().splitlines()
    assert code == 0, found
    assert found["peer"]["detail"].startswith("prefill at")
    assert found["kv"]["way"] is None or found["kv"]["way"]["device"] == "memory"
    assert found["kv"]["meeting"]["digest"] == "xxh3-128"
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert told['baton_slots{ring="sender",state="free"}'] == "16.0"
    assert not any(float(told[name]) for name in told if name.startswith("baton_handover"))


@pytest.mark.deep
def test_a_peer_that_keeps_its_kv_to_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with listening("--transport", "nixl") as (_, address):
        code, found = asked(capsys, "--peer", address, "--transport", "nixl", *TCP)
    assert code == 1
    assert "on its own machine" in found["transport"]["detail"]
    assert "--kv-network isolated" in found["transport"]["advice"]
    assert found["meeting"]["status"] == "warn" and "kv_chunks" not in found


@pytest.mark.deep
def test_nobody_and_strangers(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody() as address:
        code, found = asked(capsys, "--peer", address)
    assert code == 1 and "nothing answers" in found["peer"]["detail"]
    with serving(Scripted()) as router:
        code, found = asked(capsys, "--peer", router)
    assert code == 1 and "no Baton worker" in found["peer"]["detail"]
    assert "--listen" in found["peer"]["advice"]


@pytest.mark.slow
def test_a_peer_that_froze_and_one_that_speaks_no_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as (pid, address):
        os.kill(pid, signal.SIGSTOP)
        code, found = asked(capsys, "--peer", address)
    assert code == 1 and found["peer"]["status"] == "fail"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, found = asked(capsys, "--peer", f"127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1 and "does not speak gRPC" in found["peer"]["detail"]


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("--peer", "10.0.0.1:7000"), "kv_network"),
        (("--listen", "0.0.0.0:7000"), "kv_network"),
        (("--peer", "127.0.0.1:7000", "--ucx-transports", "tcp"), "ucx_transports"),
        (("--peer", "127.0.0.1:7000", "--ucx-devices", "eth0"), "ucx_devices"),
        (("--peer", "127.0.0.1:7000", "--kv-network", "mine"), "kv_network"),
        (("--peer", "nowhere"), "peer"),
        (("--listen", "nowhere"), "listen"),
    ],
)
def test_wrong_options_are_named(argv: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        doctor.run(parsed(*argv))
    assert refused.value.field == field


def test_options_of_a_workers_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KV_NETWORK", "trusted")
    monkeypatch.setenv("BATON_UCX_DEVICES", "eth0")
    args = parsed("--peer", "10.0.0.1:7000")
    assert (args.kv_network, args.ucx_devices) == ("trusted", "eth0")


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable; each sees the other and nothing else."""
    names = [f"baton{os.getpid()}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip -n {name} link set lo up" for name in names]
    commands.append(f"ip link add k0 netns {names[0]} type veth peer name k0 netns {names[1]}")
    for number, name in enumerate(names, 1):
        commands.append(f"ip -n {name} addr add 10.77.0.{number}/24 dev k0")
        commands.append(f"ip -n {name} link set k0 up")
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, timeout=120)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True, timeout=120
            )


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_between_two_network_namespaces() -> None:
    flags = ("--kv-network", "isolated", "--ucx-transports", "tcp,self", "--ucx-devices", "k0")
    command = ("batonlm.cli.main", "doctor", "kv", "--json")
    with (
        two_machines() as (here, there),
        started(*command, "--listen", PEER, *flags, prefix=("ip", "netns", "exec", here)),
    ):
        done = subprocess.run(
            ["ip", "netns", "exec", there, sys.executable, "-m", *command, "--peer", PEER, *flags],
            capture_output=True,
            timeout=120,
            check=False,
        )
        report = json.loads(done.stdout)
        assert done.returncode == 0, report
        assert report["kv"]["way"] == {"transport": "tcp", "device": "k0", "software": True}
