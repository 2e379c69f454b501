"""`baton doctor gpu`: each check on trees of files as machines have them, and on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli import doctor, gpu_checks
from batonlm.cli.checks import Status
from batonlm.cli.kv import fabric
from batonlm.engine.gpus import Driver, Gpu, find_driver
from tests.cli.test_doctor import parsed

GIB = 1 << 30
H100 = Gpu(0, "GPU-a", "H100", 80 * GIB, 79 * GIB)
BUSY = Gpu(1, "GPU-b", "H100", 80 * GIB, 20 * GIB)
DRIVER = Driver("580.95.05", (H100, BUSY))


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


CARD = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
}
DOWN = {**CARD, "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
FILES = {"dev/infiniband/uverbs0": ""}
OPEN = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.95\n"}


def test_the_driver() -> None:
    assert gpu_checks.driver(DRIVER).detail == "NVIDIA 580.95.05"


def test_no_driver_and_one_that_a_container_half_has(tmp_path: Path) -> None:
    none = gpu_checks.driver(None, tmp_path)
    half = gpu_checks.driver(None, machine(tmp_path, OPEN))
    assert none.status is half.status is Status.FAIL
    assert "nvidia.com/gpu" in none.advice and "NVIDIA_DRIVER_CAPABILITIES" in half.advice


@pytest.mark.parametrize(
    ("found", "limit", "status", "words"),
    [
        ((H100,), None, Status.OK, "0: H100, 79 GiB of 80 GiB free, GPU-a"),
        ((H100, BUSY), None, Status.WARN, "in use: 1"),
        ((H100, BUSY), "0", Status.OK, "GPU-a"),
        ((H100,), "3", Status.FAIL, "CUDA_VISIBLE_DEVICES=3 allows none of 1"),
        ((), None, Status.FAIL, "the driver has none"),
    ],
)
def test_gpus(found: tuple[Gpu, ...], limit: str | None, status: Status, words: str) -> None:
    finding = gpu_checks.gpus(found, limit)
    assert finding.status is status and words in finding.detail
    assert bool(finding.advice) is (status is not Status.OK)


@pytest.mark.parametrize(
    ("changes", "version", "status", "words"),
    [
        ({}, "580.95", Status.OK, "torch 2.13.0 for CUDA 13.0 computes on 1"),
        ({"cuda": None}, "580.95", Status.FAIL, "built without CUDA"),
        ({}, "570.86", Status.FAIL, "driver 570.86"),
        ({"gpus": []}, "580.95", Status.FAIL, "sees no GPU"),
        ({"gpus": [[9, 0, False]]}, "580.95", Status.FAIL, "wrong sum"),
        ({"gpus": [[7, 5, True]]}, "580.95", Status.WARN, "compute capability 7.5"),
    ],
)
def test_torch(changes: dict[str, Any], version: str, status: Status, words: str) -> None:
    said = {"torch": "2.13.0", "cuda": "13.0", "gpus": [[9, 0, True]], **changes}
    finding = gpu_checks.judge_torch(said, Driver(version, (H100,)))
    assert finding.status is status and words in finding.detail


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.OK, "no RDMA device"),
        (DOWN, Status.WARN, "mlx5_0:1 400 Gbit/s (down)"),
        (CARD, Status.FAIL, "no /dev/infiniband/uverbs"),
        ({**CARD, **FILES}, Status.OK, "mlx5_0:1 400 Gbit/s"),
    ],
)
def test_rdma(tmp_path: Path, files: dict[str, str], status: Status, words: str) -> None:
    finding = gpu_checks.rdma(fabric.look(machine(tmp_path, files)))
    assert finding.status is status and words in finding.detail


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.OK, "not needed"),
        (CARD, Status.WARN, "through host memory"),
        ({**CARD, "sys/module/nvidia_peermem/refcnt": "0"}, Status.OK, "nvidia_peermem"),
        ({**CARD, **OPEN}, Status.OK, "dma-buf"),
    ],
)
def test_gpudirect(
    tmp_path: Path,
    files: dict[str, str],
    status: Status,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.8.0-1018-aws")
    root = machine(tmp_path, files)
    finding = gpu_checks.gpudirect(fabric.look(root), root)
    assert finding.status is status and words in finding.detail
    monkeypatch.setattr("platform.release", lambda: "5.4.0")
    if words == "dma-buf":
        assert gpu_checks.gpudirect(fabric.look(root), root).status is Status.WARN


def test_locked_memory_matters_with_a_card_only(tmp_path: Path) -> None:
    without = fabric.Fabric(memlock=64 << 10)
    card = fabric.Fabric(rdma=(fabric.RdmaPort("mlx5_0:1", True, 1),), memlock=64 << 10)
    assert gpu_checks.locked_memory(without).status is Status.OK
    assert gpu_checks.locked_memory(card).status is Status.FAIL
    assert gpu_checks.locked_memory(fabric.Fabric(rdma=card.rdma)).status is Status.OK


def test_huge_pages(tmp_path: Path) -> None:
    text = "HugePages_Total:    512\nHugePages_Free:     500\nHugepagesize:       2048 kB\n"
    root = machine(tmp_path, {"proc/meminfo": text})
    assert gpu_checks.huge_pages(root).detail == "500 of 512 free, of 2 MiB"
    assert "none are needed" in gpu_checks.huge_pages(tmp_path / "nowhere").detail


def test_the_transports_in_nixls_wheel_here() -> None:
    """The real wheel has both; which CUDA torch is for decides whether it is the right one."""
    finding = gpu_checks.ucx()
    assert "nixl_cu" in finding.detail and finding.status is not Status.WARN


def test_a_c_compiler_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert gpu_checks.compiler().status is Status.FAIL
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    assert gpu_checks.compiler().detail == str(tmp_path / "gcc")


@pytest.mark.skipif(find_driver() is not None, reason="there is a GPU")
def test_without_a_driver_it_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(parsed("gpu", "--json")) == 1
    said = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in said["checks"]] == ["driver"]
    assert said["checks"][0]["advice"]
