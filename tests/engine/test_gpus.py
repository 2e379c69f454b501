"""GPUs are listed by the driver's own library, and workers of one machine share them out evenly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.engine.gpus import Gpu, claim, find_driver, select, visible
from tests.engine.nvml import build

GIB = 1 << 30
FIRST = Gpu(0, "GPU-aaaa-1", "H100", 80 * GIB, 79 * GIB)
LARGE = Gpu(1, "MIG-cccc-3", "H100 MIG 3g.40gb", 40 * GIB, 40 * GIB)
SMALL = Gpu(1, "MIG-dddd-4", "H100 MIG 1g.10gb", 10 * GIB, 10 * GIB)
ALL = [FIRST, LARGE, SMALL]


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the functions of NVML that are called, compiled: what is tested is how the
    real one would be called, types and all."""
    return str(build(tmp_path_factory.mktemp("nvml")))


def test_the_driver_tells_its_gpus_and_slices_in_place_of_their_gpu(nvml: str) -> None:
    found = find_driver(nvml)
    assert found is not None and found.version == "580.95.05"
    assert list(found.gpus) == ALL


def test_no_driver_and_a_broken_one_have_no_gpus(
    nvml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_driver("libno-such-driver.so.1") is None
    monkeypatch.setenv("FAKE_NVML", "broken")
    assert find_driver(nvml) is None


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (None, ALL),
        ("", []),
        ("0", [FIRST]),
        ("1", [LARGE, SMALL]),
        ("1,0", [LARGE, SMALL, FIRST]),
        ("GPU-aaaa", [FIRST]),
        ("MIG-dddd-4, GPU-a", [SMALL, FIRST]),
        ("0,0", [FIRST]),
        ("0,-1,1", [FIRST]),
        ("7,0", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_limits_them_in_its_order(limit: str | None, found: list[Gpu]) -> None:
    assert visible(ALL, limit) == found


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("auto", ALL),
        ("cuda", ALL),
        ("cuda:1", [LARGE]),
        ("MIG-dd", [SMALL]),
        ("GPU-aaaa-1", [FIRST]),
    ],
)
def test_an_option_selects_among_them(device: str, found: list[Gpu]) -> None:
    assert select(device, ALL) == found


@pytest.mark.parametrize("device", ["cuda:3", "GPU-x", "MIG-x", "cuda:", "cuda:-1", "gpu", ""])
def test_a_device_that_is_not_there_or_no_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        select(device, ALL)
    assert refused.value.field == "device"


def test_auto_finds_none_where_there_is_none_and_cuda_says_so() -> None:
    assert select("auto", []) == []
    with pytest.raises(InvalidArgument, match="there is none, or no NVIDIA driver"):
        select("cuda", [])


def test_workers_take_free_gpus_first_and_then_share_evenly(tmp_path: Path) -> None:
    same = [Gpu(i, f"GPU-{i}", "L4", 24 * GIB, 23 * GIB) for i in range(2)]
    taken = [claim(same, 1, tmp_path) for _ in range(4)]
    assert [one.gpus[0].index for one in taken] == [0, 1, 0, 1]
    assert [one.sharing for one in taken] == [False, False, True, True]
    taken[1].close()
    again = claim(same, 1, tmp_path)
    assert again.gpus == [same[1]], "the place that became free is taken first"
    for one in (*taken, again):
        one.close()


def test_a_gpu_that_another_program_uses_comes_last(tmp_path: Path) -> None:
    busy = Gpu(0, "GPU-0", "L4", 24 * GIB, 2 * GIB)
    idle = Gpu(1, "GPU-1", "L4", 24 * GIB, 23 * GIB)
    first, second = claim([busy, idle], 1, tmp_path), claim([busy, idle], 1, tmp_path)
    assert (first.gpus, second.gpus) == ([idle], [busy])
    first.close()
    second.close()


def test_ranks_take_different_gpus_or_none(tmp_path: Path) -> None:
    taken = claim(ALL, 2, tmp_path)
    assert taken.gpus == [FIRST, LARGE]
    with pytest.raises(InvalidArgument, match="4 whole GPUs are needed") as refused:
        claim(ALL, 4, tmp_path)
    assert refused.value.field == "device"
    third = claim(ALL, 1, tmp_path)
    assert third.gpus == [SMALL] and not third.sharing
    taken.close()
    third.close()


HOLD = """
import sys, time
from pathlib import Path
from batonlm.engine.gpus import Gpu, claim
held = claim([Gpu(0, "GPU-0", "L4", 1, 1)], 1, Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_the_gpu_of_a_killed_worker_is_free_again(tmp_path: Path) -> None:
    gpu = Gpu(0, "GPU-0", "L4", 1, 1)
    worker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "held\n"
        beside = claim([gpu], 1, tmp_path)
        assert beside.sharing
        beside.close()
    finally:
        worker.kill()
        worker.communicate()
    alone = claim([gpu], 1, tmp_path)
    assert not alone.sharing
    alone.close()


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"baton-gpus-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="somebody else"):
        claim(ALL, 1)
    assert not list((tmp_path / "elsewhere").iterdir())
