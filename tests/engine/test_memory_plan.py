"""A plan of memory is what the worker does; what does not fit is refused with field and numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.autograd import profiler

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.engine import footprint
from batonlm.engine import runner as runner_module
from batonlm.engine.config import MIB, EngineConfig
from batonlm.engine.footprint import allocate, foresee, largest_step, weights_bytes
from batonlm.engine.loader import load, wire
from batonlm.engine.memory import (
    CHECKED_POSITIONS,
    MemoryPlan,
    checked_blocks,
    host_free_bytes,
    plan_memory,
    size,
)
from batonlm.engine.quantized import settle
from batonlm.engine.runner import TorchRunner
from tests.engine.tiny_models import ARCHS, save_tiny_model

FREE = 24 * MIB
PLAIN: dict[str, Any] = {"weights": 10 * MIB, "activations": 2 * MIB, "position": 1024}


def plan(
    *,
    device: str = "cpu",
    model_len: int = 2048,
    free: int = 100 * MIB,
    total_bytes: int | None = None,
    **options: Any,
) -> MemoryPlan:
    config = EngineConfig("m", **{"kv_memory_bytes": 0, **options})
    return plan_memory(
        config,
        device=device,
        model_len=model_len,
        free_bytes=free,
        total_bytes=total_bytes,
        **PLAIN,
    )


def refused(**options: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        plan(**options)
    return caught.value


@given(
    free=st.integers(20 * MIB, 400 * MIB),
    share=st.floats(0.3, 1.0),
    block_size=st.sampled_from([16, 48, 256]),
    batch=st.integers(1, 64),
    swap=st.integers(0, 20 * MIB),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_the_pool_takes_what_is_left_and_not_more_than_is_needed(
    free: int, share: float, block_size: int, batch: int, swap: int, device: str
) -> None:
    options: dict[str, Any] = {"memory_share": share, "block_size": block_size, "max_batch": batch}
    try:
        found = plan(device=device, free=free, swap_host_bytes=swap, **options)
    except InvalidArgument as error:
        assert error.field == "memory_share"
        swapped = swap if device == "cpu" else 0
        least = max(128, len(CHECKED_POSITIONS) * checked_blocks(2048, block_size) * block_size)
        assert free * share < 12 * MIB + swapped + (least + block_size) * 1024
        return
    wanted = batch * -(-2048 // block_size)
    assert found.num_blocks <= wanted
    assert found.taken_bytes <= free * share
    if found.num_blocks < wanted:
        assert found.taken_bytes + found.block_bytes > int(free * share)
    assert found.left_bytes + found.taken_bytes == free
    assert found.sequences * found.sequence_bytes <= found.kv_bytes


def test_workers_that_share_a_gpu_get_equal_parts_whichever_starts_first() -> None:
    first = plan(device="cuda", total_bytes=100 * MIB, memory_share=0.4, max_batch=1000)
    second = plan(
        device="cuda", free=60 * MIB, total_bytes=100 * MIB, memory_share=0.4, max_batch=1000
    )
    assert first.num_blocks == second.num_blocks > 0
    assert first.usable_bytes == second.usable_bytes == 40 * MIB
    crowded = plan(device="cuda", free=30 * MIB, total_bytes=100 * MIB, memory_share=0.4)
    assert crowded.usable_bytes == 30 * MIB, "no more than is free"


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert plan(num_blocks=77).num_blocks == 77
    assert plan(kv_memory_bytes=MIB).kv_bytes == MIB
    assert plan(kv_memory_bytes=80 * MIB).kv_bytes == 80 * MIB, "the share is for what is not said"
    error = refused(kv_memory_bytes=90 * MIB)
    assert error.field == "kv_memory_bytes"
    assert "10 MiB" in error.message and "90 MiB" in error.message and "100 MiB" in error.message
    assert refused(num_blocks=10_000).field == "num_blocks"
    assert refused(kv_memory_bytes=80 * MIB, swap_host_bytes=20 * MIB).field == "kv_memory_bytes"
    assert plan(kv_memory_bytes=80 * MIB, swap_host_bytes=20 * MIB, device="cuda").num_blocks
    assert refused(kv_memory_bytes=80 * MIB, prefix_host_bytes=20 * MIB).field == "kv_memory_bytes"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_blocks": 7}, "num_blocks"),
        ({"kv_memory_bytes": 1024}, "kv_memory_bytes"),
        ({"free": 11 * MIB}, "memory_share"),
    ],
)
def test_a_pool_too_small_for_anyone_is_refused(options: dict[str, Any], field: str) -> None:
    error = refused(**options)
    assert error.field == field and "too few" in error.message
    assert plan(model_len=100, num_blocks=7).max_model_len == 100


@pytest.mark.parametrize(("model_len", "block_size", "least"), [(40, 16, 6), (1024, 256, 2)])
def test_a_pool_too_small_for_the_check_at_load_is_refused(
    model_len: int, block_size: int, least: int, tmp_path: Path
) -> None:
    folder = save_tiny_model("llama", tmp_path / "m", max_position_embeddings=model_len)

    def load_with(num_blocks: int) -> TorchRunner:
        config = EngineConfig(str(folder), block_size=block_size, num_blocks=num_blocks)
        return TorchRunner.load(config)

    with pytest.raises(InvalidArgument, match=f"takes {least}") as refused_by:
        load_with(least - 1)
    assert refused_by.value.field == "num_blocks"
    load_with(least).close()


def test_a_context_beyond_the_pool_is_refused_when_asked_for_and_else_shortened() -> None:
    error = refused(max_model_len=2048, kv_memory_bytes=MIB)
    assert error.field == "max_model_len"
    assert "2 MiB" in error.message and "1024 positions" in error.message
    shortened = plan(kv_memory_bytes=MIB)
    assert shortened.max_model_len == 1024
    assert "1 sequence of 1024 (the model's 2048 do not fit)" in dict(shortened.lines())["KV"]
    assert plan(max_model_len=1024, model_len=1024, kv_memory_bytes=MIB).max_model_len == 1024


def test_swap_is_told_in_blocks_that_fit() -> None:
    found = plan(swap_host_bytes=50_000, swap_disk_bytes=16384)
    assert (found.swap_host_blocks, found.swap_disk_blocks) == (3, 1)
    assert (found.swap_host_bytes, found.swap_disk_bytes) == (49152, 16384)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 * MIB, "300 MiB"), (-MIB, "-1 MiB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_foreseen_is_what_a_loaded_model_takes(
    arch: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and bytes, exactly; without weights against with weights."""
    config = EngineConfig(str(saved(arch)), kv_memory_bytes=0, exact=False)
    block_bytes = foresee(config, FREE).memory.block_bytes
    config = replace(config, swap_host_bytes=4 * block_bytes, swap_disk_bytes=2 * block_bytes)
    real, told = footprint.size_pool, list[MemoryPlan]()

    def sized(*arguments: Any, **options: Any) -> MemoryPlan:
        told.append(real(*arguments, **options))
        return told[-1]

    monkeypatch.setattr(runner_module, "size_pool", sized)
    monkeypatch.setattr(runner_module, "free_bytes", lambda device: FREE)
    runner = TorchRunner.load(config)
    foreseen = foresee(config, FREE)
    assert told == [foreseen.memory]
    memory = foreseen.memory
    assert runner.num_blocks == memory.num_blocks
    assert runner.num_blocks < config.max_batch * -(-memory.model_len // 16), "memory must decide"
    assert runner.model.max_model_len == memory.max_model_len
    pool: Any = runner.memory
    assert pool.keys.nbytes + pool.values.nbytes == memory.kv_bytes
    assert pool.block_bytes == memory.block_bytes
    assert runner.num_swap_blocks == (memory.swap_host_blocks, memory.swap_disk_blocks) == (4, 2)
    layout = replace(runner.layout, model_digest="")
    assert layout == foreseen.shape.layout
    runner.close()


@pytest.mark.parametrize("arch", ["llama_tied", "gpt2", "gpt_oss", "mixtral", "deepseek_v3"])
def test_quantized_weights_are_foreseen_too(arch: str, saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved(arch)), num_blocks=64, quantize="int8")
    foreseen = foresee(config, FREE).memory.weights_bytes
    loaded = load(replace(config, quantize="none"))
    wire(loaded.network)
    kinds = "none", settle("int8", loaded.device, torch.float32)
    plain, small = (weights_bytes(loaded.network, loaded.device, kind) for kind in kinds)
    assert small == foreseen < plain


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_oss", "deepseek_v3"])
def test_weights_and_activations_are_what_they_are_said_to_be(
    arch: str, saved: Callable[[str], Path]
) -> None:
    folder = saved(arch)
    config = EngineConfig(str(folder), num_blocks=256, max_batch=16, max_step_tokens=256)
    needs = foresee(config).memory
    runner = TorchRunner.load(config)
    gc.collect()  # what an earlier case left would count as negative where it is freed meanwhile
    with profiler.profile(profile_memory=True) as profile:
        runner.forward(largest_step(config, runner.model.max_model_len))
    events = profile.kineto_results.events()
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    assert most <= needs.activation_bytes <= 4 * most
    on_disk = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    tied = arch == "gpt2"
    assert on_disk <= needs.weights_bytes <= on_disk * (1.5 if tied else 1.01)


def test_the_largest_step_is_as_large_as_it_may_be(saved: Callable[[str], Path]) -> None:
    for tokens, batch, longest in ((512, 64, 2048), (16, 64, 2048), (4096, 1, 1024), (1, 1, 8)):
        config = EngineConfig("m", max_step_tokens=tokens, max_batch=batch)
        step = largest_step(config, longest)
        assert step.num_tokens == tokens
        assert max(len(chunk.token_ids) for chunk in step.chunks) <= longest
        blocks = [chunk.extents for chunk in step.chunks]
        assert len(set(blocks)) == len(blocks)


def test_memory_that_is_refused_becomes_a_sentence() -> None:
    def too_much() -> torch.Tensor:
        return torch.zeros(1 << 60, dtype=torch.uint8)

    with pytest.raises(InvalidArgument) as caught:
        allocate(plan(), too_much)
    assert caught.value.field == "kv_memory_bytes"
    assert "of KV could not be allocated on cpu, where 100 MiB were free" in caught.value.message

    def wrong() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        allocate(plan(), wrong)


@pytest.mark.deep
def test_a_range_too_small_for_the_model_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    file = folder / "model.safetensors"
    weights = {
        name: tensor * 2000 if "mlp" in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(InvalidArgument) as caught:
        TorchRunner.load(EngineConfig(str(folder), num_blocks=64, dtype="float16"))
    assert caught.value.field == "dtype" and "float16" in caught.value.message
    TorchRunner.load(EngineConfig(str(folder), num_blocks=64, exact=False)).close()


def system(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroups"


V2 = "0::/pod/container\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n"


@pytest.mark.parametrize(
    ("files", "kib"),
    [
        ({"proc/self/cgroup": V2}, 8000),
        (
            {
                "proc/self/cgroup": V2,
                "cgroups/pod/container/memory.max": "max\n",
                "cgroups/pod/container/memory.current": "1024\n",
                "cgroups/pod/container/memory.stat": "anon 1\n",
                "cgroups/pod/memory.max": f"{5000 * 1024}\n",
                "cgroups/pod/memory.current": f"{3000 * 1024}\n",
                "cgroups/pod/memory.stat": f"inactive_file {500 * 1024}\nactive_file 1024\n",
            },
            2501,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "cgroups/memory/memory.limit_in_bytes": f"{700 * 1024}",
                "cgroups/memory/memory.usage_in_bytes": f"{200 * 1024}",
                "cgroups/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {1024}\n",
            },
            501,
        ),
        (
            {
                "proc/self/cgroup": V2,
                "cgroups/memory.max": "1024",
                "cgroups/memory.current": "4096",
                "cgroups/memory.stat": "",
            },
            0,
        ),
    ],
)
def test_free_host_memory_heeds_control_groups(
    tmp_path: Path, files: dict[str, str], kib: int
) -> None:
    assert host_free_bytes(*system(tmp_path, files)) == kib * 1024


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        host_free_bytes(tmp_path, tmp_path)
    proc, cgroups = system(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\n", "proc/self/cgroup": V2})
    with pytest.raises(Unavailable):
        host_free_bytes(proc, cgroups)


def test_this_machine_has_memory() -> None:
    assert 0 < host_free_bytes() < 1 << 50
