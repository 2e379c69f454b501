"""KV on the wire in another type than it is kept in: every backend sends the nearest numbers and
takes them as they come, and what a narrow wire loses is as little as its type allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm.core.request.model import (
    DTYPE_BYTES,
    KV_DTYPES,
    SCALED,
    SCALED_FP8,
    SCALED_INT8,
    KvLayout,
)
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.kv.cache import (
    DTYPES,
    BlockCache,
    KvCache,
    converted,
    is_lossless,
    parts_of,
    recoded,
)
from batonlm.engine.runner import TorchRunner
from batonlm.testing.fake_runner import FakeRunner
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import generate, random_prompts

LAYOUT = KvLayout("d", "float32", 2, 3, 24, 16)
TABLE = ((7, 1), (2, 2))
FIRST, COUNT = 5, 30
KEPT = tuple(DTYPE_BYTES)

FLOATS = [name for name in KEPT if DTYPES[name].is_floating_point]

Cache = KvCache | BlockCache


class ByKernels(BlockCache):
    """With the kernels on any device."""

    def __init__(self, layout: KvLayout, *rest: Any, **named: Any):
        super().__init__(layout, *rest, kernels=True, **named)


BACKENDS = (
    pytest.param(KvCache, "cpu", id="head-major"),
    pytest.param(BlockCache, "cpu", id="block-major"),
    pytest.param(ByKernels, INTERPRETER.values[0], id="interpreter", marks=INTERPRETER.marks),
    pytest.param(BlockCache, CUDA.values[0], id="cuda", marks=CUDA.marks),
)


def cache_of(backend: type[Cache], device: str, wire: str, kept: str) -> Cache:
    if backend is ByKernels:
        pytest.importorskip("triton")
    shape = replace(LAYOUT, dtype=wire)
    return backend(shape, 10, 16, torch.device(device), dtype=DTYPES[kept])


def sent(cache: Cache) -> bytearray:
    payload = bytearray(COUNT * cache.layout.bytes_per_position)
    cache.pack(TABLE, FIRST, COUNT, memoryview(payload))
    return payload


def fill(cache: Cache, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for memory in (cache.keys, cache.values):
        numbers = 30 * torch.randn(memory.shape, generator=generator)
        memory.copy_(numbers if memory.is_floating_point() else numbers.abs().clamp_max(126))
    for memory in cache.scales:
        memory.copy_(torch.randint(100, 140, memory.shape, generator=generator))


def in_type(payload: bytearray, before: str, after: str) -> bytearray:
    parts = parts_of(LAYOUT, COUNT, torch.frombuffer(payload, dtype=DTYPES[before]))
    by_layer = [part.flatten(1) for part in recoded(parts, DTYPES[after])]
    return bytearray(torch.cat(by_layer, 1).view(torch.uint8).numpy().tobytes())


@pytest.mark.deep
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("wire", DTYPE_BYTES)
def test_every_number_travels_as_the_nearest_and_is_kept_as_it_came(
    wire: str, kept: str, backend: type[Cache], device: str
) -> None:
    """Against a wire of the type that they are kept in, where nothing is converted."""
    senders = [cache_of(backend, device, each, kept) for each in (kept, wire)]
    for sender in senders:
        fill(sender, seed=1)
    plain, payload = map(sent, senders)
    scales = 2 if wire in SCALED else 0
    assert len(payload) == COUNT * 2 * 3 * ((24 + 16) * DTYPE_BYTES[wire] + scales)
    assert payload == in_type(plain, kept, wire)

    takers = [cache_of(backend, device, each, kept) for each in (kept, wire)]
    for taker, arrived in zip(takers, (in_type(payload, wire, kept), payload), strict=True):
        fill(taker, seed=2)
        taker.unpack(TABLE, FIRST, COUNT, memoryview(arrived))
    for one, other in ((cache.keys, cache.values) for cache in takers):
        assert one.dtype == other.dtype == DTYPES[kept]
    assert torch.equal(takers[0].keys, takers[1].keys)
    assert torch.equal(takers[0].values, takers[1].values)
    if is_lossless(kept, wire):
        assert sent(takers[1]) == in_type(plain, kept, wire)


@pytest.mark.parametrize("kept", FLOATS)
@pytest.mark.parametrize("wire", FLOATS)
def test_what_a_type_cannot_hold_becomes_its_largest_number(wire: str, kept: str) -> None:
    numbers = torch.tensor([3e38, -3e38, torch.inf, -torch.inf, torch.nan, 0.0, -1.5])
    numbers = numbers.to(DTYPES[kept])
    found = converted(numbers, DTYPES[wire]).float()
    largest = torch.finfo(DTYPES[wire]).max
    assert found[5:].tolist() == [0.0, -1.5] and found[4].isnan()
    if largest < torch.finfo(DTYPES[kept]).max:
        assert bool((found[:4].abs() <= largest).all()) and bool(
            (found[:4].abs() > 0.9 * min(largest, 3e38)).all()
        )
    else:
        assert torch.equal(found[:4], numbers[:4].float())


@pytest.mark.parametrize("wire", KV_DTYPES)
def test_the_runner_without_torch_sends_its_bytes_as_numbers_of_any_type(wire: str) -> None:
    sender, taker = (FakeRunner(16, block_size, wire_dtype=wire) for block_size in (16, 32))
    (prompt,) = random_prompts([60], 1000)
    sender.submit(StepPlan(1, (Chunk(1, prompt, 0, ((3, 4),), ()),)))
    sender.collect()
    payload = bytearray(60 * 16)
    assert sender.layout.dtype == KV_DTYPES[wire]
    assert sender.layout.bytes_per_position == 16
    sender.pack(((3, 4),), 0, 60, memoryview(payload))
    taker.unpack(((5, 2),), 0, 60, memoryview(payload))
    tables = (((3, 4),), ((5, 2),))
    tokens = [
        generate(runner, [prompt], [table], 4, start=59)
        for runner, table in zip((sender, taker), tables, strict=True)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.deep
@pytest.mark.parametrize("wire", ["auto", "bfloat16", "float16", "int8", "fp8"])
def test_a_model_answers_after_its_kv_has_travelled(
    wire: str, saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly, where the wire holds what is kept; else it says that it does not promise to."""
    config = EngineConfig(str(saved("llama")), num_blocks=24, kv_wire_dtype=wire)
    runner = TorchRunner.load(config)
    (prompt,) = random_prompts([80], 1000)
    here, there = ((0, 8),), ((10, 8),)
    whole = generate(runner, [prompt], [here], 16)
    payload = bytearray(79 * runner.layout.bytes_per_position)
    runner.pack(here, 0, 79, memoryview(payload))
    runner.unpack(there, 0, 79, memoryview(payload))
    after = generate(runner, [prompt], [there], 16, start=79)
    assert len(after[0]) == 16
    sent_as = KV_DTYPES.get(wire, "float32")
    reason = f"KV is kept as float32 and handed over as {sent_as}"
    assert runner.layout.dtype == sent_as
    assert runner.exact == (wire == "auto")
    assert (reason in caplog.text) == (wire != "auto")
    if wire == "auto":
        assert after == whole
        return
    memory = runner.memory
    assert isinstance(memory, KvCache)
    for numbers in (memory.keys, memory.values):
        kept, arrived = (numbers[:, :, start : start + 79] for start in (0, 160))
        assert kept.abs().max() > 0
        largest = kept.abs().amax(-1, keepdim=True)
        if sent_as == SCALED_INT8:
            # Half of a step, of which the largest is more than 63.5.
            off = largest / 127
        elif sent_as == SCALED_FP8:
            # Half of the last of three bits, or half of a step beside the largest.
            off = kept.abs() * 2**-4 + largest * 2**-17
        else:
            kind = torch.finfo(DTYPES[sent_as])
            off = kept.abs() * kind.eps / 2 + kind.tiny
        assert bool(((kept - arrived).abs() <= off).all())
