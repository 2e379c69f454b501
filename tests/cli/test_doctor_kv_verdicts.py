"""What `baton doctor kv` says: every message, from the facts that lead to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batonlm.cli.checks import Status
from batonlm.cli.kv import fabric, verdicts
from batonlm.cli.kv.fabric import Fabric, NetDevice, RdmaPort, Way

HERE, FAR = "127.0.0.1:7000", "10.0.0.7:7000"
ETH = NetDevice("eth0", 1500, 100_000)
MLX = RdmaPort("mlx5_0:1", True, 100_000)
NOTHING = Fabric()
TCP = Way("tcp", "eth0", True)


def facts(**changes: Any) -> dict[str, Any]:
    """Of a probe that went well; None leaves a fact out."""
    good = {
        "peer": {"role": "prefill", "instance_id": "ab" * 16, "address": FAR, "has_kv": True},
        "meeting": {
            "seconds": 4e-4,
            "digest": "xxh3-128",
            "buffer_bytes": 1 << 20,
            "kv_network": "trusted",
            "ucx_transports": ["self", "sm", "tcp"],
        },
        "ours": {"kv_network": "trusted", "ucx_transports": ["self", "tcp"], "ucx_devices": []},
        "transport": "nixl",
        "memcpy_bytes_per_s": 1e10,
        "kv_chunks": {"count": 8, "bytes": 1 << 20, "seconds": 3e-3},
        "round_trip_s": 3e-5,
        "reads": [{"bytes": 1 << 20, "seconds": 1e-4, "bytes_per_s": 9e9}],
        "done": True,
    }
    return {name: fact for name, fact in {**good, **changes}.items() if fact is not None}


def until(stage: str, reason: str, message: str, **changes: Any) -> dict[str, Any]:
    """Of a probe that failed before it told of `stage`."""
    after = dict.fromkeys(list(facts())[list(facts()).index(stage) :])
    return facts(**{**after, **changes}, error={"reason": reason, "message": message, "field": ""})


def judged(
    seen: dict[str, Any],
    way: Way | None = TCP,
    machine: Fabric = NOTHING,
    address: str = FAR,
    devices: tuple[str, ...] = (),
) -> dict[str, tuple[Status, str]]:
    """Status and text of every finding."""
    found = verdicts.judge(address, seen, way, machine, devices)
    for name, finding in found.items():
        assert bool(finding.advice) == (finding.status is not Status.OK), name
    return {name: (f.status, f"{f.detail} -> {f.advice}") for name, f in found.items()}


def test_all_is_well() -> None:
    found = judged(facts())
    assert list(found) == ["peer", "meeting", "transport", "kv_chunks", "round trip", "bandwidth"]
    assert {status for status, _ in found.values()} == {Status.OK}
    assert "tcp on eth0" in found["transport"][1]
    assert "xxh3-128" in found["meeting"][1] and "400 µs" in found["meeting"][1]
    assert "8 of 1 MiB verified, 3 ms" in found["kv_chunks"][1]
    assert "30 µs" in found["round trip"][1]
    assert "1 MiB 9 GB/s (memcpy 10 GB/s)" in found["bandwidth"][1]


def test_unknown_rather_than_guessed() -> None:
    assert "unknown" in judged(facts(), way=None)["transport"][1]


@pytest.mark.parametrize(
    ("seen", "name", "words"),
    [
        (until("peer", "UNAVAILABLE", "x"), "peer", ["nothing answers", "--advertise"]),
        (until("peer", "UNAVAILABLE", "x", accepts=True), "peer", ["does not speak gRPC"]),
        (until("peer", "UNIMPLEMENTED", "no call"), "peer", ["no Baton worker", "--listen"]),
        (until("peer", "INTERNAL", "odd"), "peer", ["no Baton worker: odd"]),
        (
            until("meeting", "UNIMPLEMENTED", "x"),
            "meeting",
            ["prefill worker gives no KV away"],
        ),
        (until("meeting", "UNAVAILABLE", "gone"), "meeting", ["gone", "log"]),
        (
            until("transport", "INCOMPATIBLE", "cannot be reached"),
            "transport",
            ["cannot be reached", "--ucx-devices", "firewall"],
        ),
        (
            until("kv_chunks", "HANDOVER_FAILED", "the sender left"),
            "kv_chunks",
            ["the sender left"],
        ),
        (
            until("kv_chunks", "HANDOVER_FAILED", "a KV chunk is not what was announced"),
            "kv_chunks",
            ["changed on their way", "do not serve"],
        ),
        (until("round_trip_s", "HANDOVER_FAILED", "no"), "measuring", ["no"]),
    ],
)
def test_failures(seen: dict[str, Any], name: str, words: list[str]) -> None:
    status, text = judged(seen)[name]
    assert status is Status.FAIL
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (("trusted", ["tcp"]), ("local", ["sm"]), ["on its own machine", "--kv-network trusted"]),
        (("trusted", ["rc", "self"]), ("trusted", ["tcp", "self"]), ["no transport", "rc,self"]),
        (("local", ["sm"]), ("local", ["sm"]), ["only shared memory", "isolated or trusted"]),
        (("local", ["sm"]), ("trusted", ["sm", "tcp"]), ["only shared memory"]),
    ],
)
def test_why_memory_cannot_be_reached(
    ours: tuple[str, list[str]], theirs: tuple[str, list[str]], words: list[str]
) -> None:
    meeting = {**facts()["meeting"], "kv_network": theirs[0], "ucx_transports": theirs[1]}
    seen = until(
        "transport",
        "INCOMPATIBLE",
        "cannot be reached",
        meeting=meeting,
        ours={"kv_network": ours[0], "ucx_transports": ours[1]},
    )
    status, text = judged(seen)["transport"]
    assert status is Status.FAIL
    for word in words:
        assert word in text


def test_a_worker_without_kv() -> None:
    peer = {**facts()["peer"], "role": "tokenizer", "has_kv": False}
    after = dict.fromkeys(("meeting", "transport", "kv_chunks"))
    found = judged(facts(peer=peer, **after))
    assert list(found) == ["peer"]
    assert found["peer"][0] is Status.FAIL and "tokenizer" in found["peer"][1]


def test_an_address_that_only_its_own_machine_knows() -> None:
    peer = {**facts()["peer"], "address": HERE}
    assert judged(facts(peer=peer))["peer"][0] is Status.WARN
    assert judged(facts(peer=peer), address=HERE)["peer"][0] is Status.OK


def test_two_declarations() -> None:
    meeting = {**facts()["meeting"], "kv_network": "isolated"}
    status, text = judged(facts(meeting=meeting))["meeting"]
    assert status is Status.WARN and "isolated" in text and "trusted here" in text


def test_loopback_though_nixl_was_wanted() -> None:
    assert judged(facts(transport="loopback"), way=None)["transport"][0] is Status.WARN


def test_tcp_though_there_is_rdma() -> None:
    status, text = judged(facts(), machine=Fabric((ETH,), (MLX,), True))["transport"]
    assert status is Status.WARN and "--ucx-devices mlx5_0:1" in text
    found = judged(facts(), machine=Fabric((ETH,), (MLX,), False))
    assert "/dev/infiniband" in found["transport"][1]
    assert found["rdma"][0] is Status.WARN and "--device /dev/infiniband" in found["rdma"][1]


def test_rdma_that_is_down() -> None:
    status, text = judged(facts(), machine=Fabric(rdma=(RdmaPort("mlx5_0:1", False, 0),)))["rdma"]
    assert status is Status.WARN and "no port is active: mlx5_0:1" in text


def test_memory_that_may_not_be_locked() -> None:
    low = Fabric(rdma=(MLX,), rdma_files=True, memlock=65536)
    way = Way("rc_mlx5", "mlx5_0:1", False)
    status, text = judged(facts(), way, low)["locked memory"]
    assert status is Status.WARN and "64 KiB" in text and "IPC_LOCK" in text
    assert "locked memory" not in judged(facts(), way, Fabric(rdma=(MLX,), rdma_files=True))
    assert "locked memory" not in judged(facts(), machine=Fabric(memlock=65536))


def test_a_device_that_is_not_there() -> None:
    found = judged(facts(), machine=Fabric((ETH,), (MLX,), True), devices=("eth0", "mlx5_9:1"))
    assert found["devices"][0] is Status.FAIL
    assert "no mlx5_9:1 here" in found["devices"][1] and "mlx5_0:1" in found["devices"][1]
    assert "devices" not in judged(facts(), machine=Fabric((ETH,)), devices=("eth0",))


def test_a_link_that_could_do_more() -> None:
    slow = [{"bytes": 1 << 20, "seconds": 1e-3, "bytes_per_s": 1e9}]
    status, text = judged(facts(reads=slow), machine=Fabric((ETH,)))["bandwidth"]
    assert status is Status.WARN and "12.5 GB/s" in text and "MTU of eth0 is 1500" in text
    jumbo = Fabric((NetDevice("eth0", 9000, 100_000),))
    assert "MTU" not in judged(facts(reads=slow), machine=jumbo)["bandwidth"][1]
    unknown = Fabric((NetDevice("eth0", 1500, 0),))
    assert judged(facts(reads=slow), machine=unknown)["bandwidth"][0] is Status.OK


def test_shared_memory_that_is_slow_or_in_software() -> None:
    slow = [{"bytes": 1 << 20, "seconds": 1e-3, "bytes_per_s": 1e9}]
    cma = Way("cma", "memory", False)
    assert judged(facts(reads=slow), cma)["bandwidth"][0] is Status.WARN
    assert judged(facts(), cma)["bandwidth"][0] is Status.OK
    status, text = judged(facts(), Way("sysv", "memory", True))["transport"]
    assert status is Status.WARN and "software" in text


def test_what_a_machine_has(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert fabric.look(tmp_path).names == frozenset()
    for port, state in ((1, "4: ACTIVE\n"), (2, "1: DOWN\n")):
        write(f"sys/class/infiniband/mlx5_0/ports/{port}/state", state)
        write(f"sys/class/infiniband/mlx5_0/ports/{port}/rate", "100 Gb/sec (4X EDR)\n")
    write("sys/class/net/eth0/mtu", "1500\n")
    write("sys/class/net/eth0/speed", "25000\n")
    write("sys/class/net/lo/mtu", "65536\n")
    write("dev/infiniband/uverbs0", "")
    seen = fabric.look(tmp_path)
    assert seen.rdma == (RdmaPort("mlx5_0:1", True, 100_000), RdmaPort("mlx5_0:2", False, 100_000))
    assert seen.active == ["mlx5_0:1"] and seen.rdma_files
    assert seen.net == (NetDevice("eth0", 1500, 25_000), NetDevice("lo", 65536, 0))
    assert seen.names == {"mlx5_0", "mlx5_0:1", "mlx5_0:2", "eth0", "lo"}
    assert seen.mbit("mlx5_0:1") == 100_000 and seen.mbit("nowhere") == 0


def test_locked_memory_by_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    status.write_text("Name:\tx\nCapEff:\t00000000a80425fb\n")
    assert fabric.look(tmp_path).memlock == 65536
    status.write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    assert fabric.look(tmp_path).memlock is None


LOG = """\
[1.0] [vm:1:0]      ucp_worker.c:1997 UCX  INFO  4e1e self cfg#0 rma_am(tcp/lo) am(tcp/lo)
[1.0] [vm:1:0]   | 4e1e self cfg#0                                    |
[1.0] [vm:1:0]   | remote memory read by ucp_get* into host from host |
[1.0] [vm:1:0]   +--------+-----------------+-------------------------+
[1.0] [vm:1:0]   | Range  |   Description   |         Config          |
[1.0] [vm:1:0]   | 0..inf | zero-copy       | self/memory             |
[1.0] [vm:1:0]   | 4e1e inter-node cfg#1                              |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host to host  |
[1.0] [vm:1:0]   | 0..inf | zero-copy       | tcp/eth9                |
[1.0] [vm:1:0]   | 4e1e inter-node cfg#1                              |
[1.0] [vm:1:0]   | remote memory read by ucp_get* into host from host |
[1.0] [vm:1:0]   | Range       |   Description   |         Config     |
[1.0] [vm:1:0]   |     0..8184 | short           | rc_mlx5/mlx5_0:1   |
[1.0] [vm:1:0]   |   8185..inf | zero-copy       | 50% on rc_mlx5/mlx5_1:1 and 50% on x |
[1.0] [vm:1:0]   | 4e1e inter-node cfg#1                              |
[1.0] [vm:1:0]   | active message by ucp_am_send* from host memory    |
[1.0] [vm:1:0]   | 0..inf | zero-copy       | tcp/eth8                |
"""


def test_the_way_of_large_reads_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "ucx.log"
    log.write_text(LOG)
    assert fabric.way_of_reads(log) == Way("rc_mlx5", "mlx5_1:1", False)
    log.write_text(LOG.replace("inter-node", "self"))
    assert fabric.way_of_reads(log) is None
    log.write_text(LOG.replace("| zero-copy       | 50% on", "| software emulation | 50% on"))
    assert fabric.way_of_reads(log) == Way("rc_mlx5", "mlx5_1:1", True)


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert fabric.way_of_reads(tmp_path / "none") is None
