"""What the options leave open is chosen by role, device and model; what they say is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.engine.gpus import Driver, Gpu
from batonlm.worker import hardware
from batonlm.worker.hardware import Sizes, processor, settled, sizes
from batonlm.worker.options import DecodeConfig, WorkerOptions

GIB = 1 << 30
H100 = Gpu(0, "GPU-0", "H100", 80 * GIB, 79 * GIB)
L4 = Gpu(1, "GPU-1", "L4", 22 * GIB, 22 * GIB)


@pytest.mark.parametrize(
    ("memory_gib", "weights_gib", "prefill", "decode"),
    [
        (None, 15, Sizes(512, 64, 0.8), Sizes(256, 64, 0.8)),
        (79.6, 1.2, Sizes(8192, 256, 0.9), Sizes(1024, 256, 0.9)),
        (79.6, 15, Sizes(4096, 256, 0.9), Sizes(1024, 256, 0.9)),
        (79.6, 33, Sizes(2048, 256, 0.9), Sizes(512, 256, 0.9)),
        (79.6, 0, Sizes(2048, 256, 0.9), Sizes(512, 256, 0.9)),
        (39.4, 15, Sizes(4096, 256, 0.9), Sizes(1024, 256, 0.9)),
        (22.0, 1.2, Sizes(4096, 128, 0.9), Sizes(1024, 128, 0.9)),
        (9.8, 1.2, Sizes(2048, 64, 0.9), Sizes(1024, 64, 0.9)),
    ],
)
def test_sizes_by_device_and_model(
    memory_gib: float | None, weights_gib: float, prefill: Sizes, decode: Sizes
) -> None:
    memory = None if memory_gib is None else int(memory_gib * GIB)
    weights = int(weights_gib * GIB)
    assert sizes("prefill", memory, weights) == prefill
    assert sizes("decode", memory, weights) == decode


CPU = """processor : 0
vendor_id : GenuineIntel
model : 143
model name : Intel(R) Xeon(R) Processor
cpu MHz : {mhz}
flags : fpu {flags} avx2 fma

processor : 1
"""


def test_processors_of_one_name_have_the_same_arithmetic(tmp_path: Path) -> None:
    def name(mhz: str, flags: str) -> str:
        file = tmp_path / "cpuinfo"
        file.write_text(CPU.format(mhz=mhz, flags=flags))
        return processor("cpu", file)

    assert name("2000.0", "avx512f") == name("2100.0", "avx512f md_clear")
    assert name("2000.0", "avx512f") != name("2000.0", "")
    assert processor("cpu", tmp_path / "none") and processor("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets the GPUs of this machine and whether torch here can use any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def has(*gpus: Gpu, torch: bool = True) -> None:
        driver = Driver("580", gpus) if gpus else None
        monkeypatch.setattr(hardware, "find_driver", lambda: driver)
        monkeypatch.setattr(hardware, "torch_has_cuda", lambda: torch)

    return has


def test_without_a_gpu_a_worker_is_as_on_any_cpu(machine: Callable[..., None]) -> None:
    machine()
    with settled("prefill", WorkerOptions(model="m")) as found:
        options = found.options
        assert (options.device, options.step_tokens, options.max_running) == ("cpu", 512, 64)
        assert options.memory_share == 0.8
        assert "device=cpu" in found.why and "step_tokens=512" in found.why
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_gpu_is_taken_and_becomes_the_only_one(machine: Callable[..., None]) -> None:
    machine(H100, L4)
    with settled("decode", DecodeConfig(model="m")) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
        assert (first.options.device, first.options.max_running) == ("cuda", 256)
        assert "H100 GPU-0" in first.why
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        with settled("decode", DecodeConfig(model="m")) as second:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
            assert second.options.max_running == 128


def test_ranks_take_whole_gpus(machine: Callable[..., None]) -> None:
    parts = [Gpu(1, f"MIG-{i}", "H100 MIG 1g.10gb", 10 * GIB, 10 * GIB) for i in range(2)]
    machine(H100, *parts)
    with settled("decode", DecodeConfig(model="m", device="MIG-0")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-0"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    both = DecodeConfig(model="m", tensor_parallel=2)
    with pytest.raises(InvalidArgument, match="2 whole GPUs are needed"), settled("decode", both):
        pass


def test_only_decode_records_decode_steps(machine: Callable[..., None]) -> None:
    machine(H100)
    for role, recorded in (("prefill", False), ("decode", True)):
        with settled(role, DecodeConfig(model="m")) as found:
            assert found.options.graphs is recorded


def test_what_the_operator_says_is_kept(machine: Callable[..., None]) -> None:
    machine(H100)
    said = DecodeConfig(model="m", step_tokens=99, max_running=3, memory_share=0.5)
    with settled("decode", said) as found:
        options = found.options
        assert (options.step_tokens, options.max_running, options.memory_share) == (99, 3, 0.5)
        assert "step_tokens" not in found.why


def test_the_models_files_count(machine: Callable[..., None], tmp_path: Path) -> None:
    machine(H100)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * GIB)
    for ranks, tokens in ((1, 4096), (2, 8192)):
        gpus = [Gpu(i, f"GPU-{ranks}-{i}", "H100", 80 * GIB, 79 * GIB) for i in range(2)]
        machine(*gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        options = WorkerOptions(model=str(tmp_path), tensor_parallel=ranks)
        with settled("prefill", options) as found:
            assert found.options.step_tokens == tokens, found.why


def test_auto_leaves_a_gpu_alone_that_torch_cannot_use(machine: Callable[..., None]) -> None:
    machine(H100, torch=False)
    with settled("decode", DecodeConfig(model="m")) as found:
        assert found.options.device == "cpu"


@pytest.mark.parametrize(("device", "ranks"), [("cuda:2", 1), ("nonsense", 1), ("auto", 3)])
def test_a_device_that_cannot_be_had_is_refused_by_name(
    machine: Callable[..., None], device: str, ranks: int
) -> None:
    machine(H100, L4)
    options = DecodeConfig(model="m", device=device, tensor_parallel=ranks)
    with pytest.raises(InvalidArgument) as refused, settled("decode", options):
        pass
    assert refused.value.field == "device"
