"""Real worker processes on a machine with GPUs, with a stand-in for NVIDIA's library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonlm.cli.layout import resolve_model
from tests.engine.nvml import build


@contextmanager
def worker(environment: dict[str, str]) -> Iterator[str]:
    """A decode worker with the fake runner; the line of its log that says what it chose."""
    flags = ("--runner", "fake", "--transport", "loopback", "--device", "cuda")
    command = [sys.executable, "-m", "batonlm.testing.worker", "decode", *flags]
    listen = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    process = subprocess.Popen(
        [*command, *listen, "--model", str(resolve_model("")[0])],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if "device=cuda" in line:
                break
        else:
            raise AssertionError("".join(said))
        yield line
    finally:
        process.kill()
        process.communicate()


def test_workers_take_a_gpu_each_and_leave_it_when_they_die(tmp_path: Path) -> None:
    library = build(tmp_path)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    with worker(environment) as second_stays:
        assert "H100 GPU-aaaa-1 of 80 GiB) step_tokens=1024 max_running=256" in second_stays
        with worker(environment) as first:
            assert "H100 MIG 3g.40gb MIG-cccc-3 of 40 GiB)" in first
        with worker(environment) as again:
            assert "MIG-cccc-3" in again, "its holder was killed"
            with worker({**environment, "CUDA_VISIBLE_DEVICES": "0"}) as sharing:
                assert "GPU-aaaa-1" in sharing and "which another worker uses, too" in sharing


@pytest.mark.parametrize("limit", ["7", ""])
def test_a_worker_without_its_gpu_ends_with_the_options_name(tmp_path: Path, limit: str) -> None:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(build(tmp_path).parent),
        "CUDA_VISIBLE_DEVICES": limit,
    }
    with (
        pytest.raises(AssertionError, match="device: cuda is not among the GPUs"),
        worker(environment),
    ):
        pass
