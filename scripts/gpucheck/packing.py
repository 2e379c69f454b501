"""KV between the pool and host memory: for a hand-over, and for swapping."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from baton_loadtest.report import Result
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import BlockSwap, StepPlan
from batonlm.engine.config import MIB
from batonlm.engine.kv.cache import BlockCache
from batonlm.engine.kv.swap import SwapMemory
from gpucheck.ceilings import COPY, TO_DEVICE, TO_HOST
from gpucheck.check import Check
from gpucheck.figures import median
from gpucheck.timing import seconds

BLOCK = 16
GOAL = 0.8
"""Of a plain copy between pinned host memory and the device."""


def layout(check: Check) -> KvLayout:
    """Of Llama 8B, or a tiny one."""
    if check.on_gpu:
        return KvLayout("", "bfloat16", 32, 8, 128, 128)
    return KvLayout("", "float32", 2, 2, 16, 16)


def run(check: Check) -> Iterator[Result]:
    """Bytes a second from scattered blocks into one buffer of pinned memory, and back."""
    wire = layout(check)
    for mib in (4, 32, 64) if check.on_gpu else (1,):
        blocks = mib * MIB // wire.bytes_per_position // BLOCK if check.on_gpu else 4
        memory = pool(check, wire, 2 * blocks)
        table, count = _scattered(2 * blocks, blocks), blocks * BLOCK
        host = torch.empty(
            count * wire.bytes_per_position, dtype=torch.uint8, pin_memory=check.on_gpu
        )
        view = memoryview(host.numpy())  # type: ignore[arg-type]  # an array is a buffer
        taken = seconds(partial(memory.gather, table, 0, count), check.device)
        name = f"gather {mib} MiB on the device"
        yield check.speed(name, 2 * view.nbytes / taken, "B/s", COPY)
        # These wait for the device: the host's clock is the whole of it.
        taken = _host_seconds(partial(memory.pack, table, 0, count, view))
        yield check.speed(f"pack {mib} MiB to the host", view.nbytes / taken, "B/s", TO_HOST, GOAL)
        taken = _host_seconds(partial(memory.unpack, table, 0, count, view))
        name = f"unpack {mib} MiB from the host"
        yield check.speed(name, view.nbytes / taken, "B/s", TO_DEVICE, GOAL)


def pool(check: Check, wire: KvLayout, blocks: int) -> BlockCache:
    """So many blocks full of random numbers."""
    device = torch.device(check.device)
    memory = BlockCache(wire, blocks, BLOCK, device, kernels=check.on_gpu)
    memory.storage.normal_()
    return memory


def swap(check: Check) -> Iterator[Result]:
    """Blocks of preempted sequences to host memory and back, and whether they come back whole."""
    wire = layout(check)
    blocks = 1024 if check.on_gpu else 16
    memory = pool(check, wire, 2 * blocks)
    before = memory.storage[:blocks].clone()
    host = SwapMemory(memory, host_bytes=blocks * memory.block_bytes)
    try:
        moved = BlockSwap(tuple(range(blocks)), tuple(range(blocks)))
        out, back = StepPlan(1, (), swap_out=(moved,)), StepPlan(2, (), swap_in=(moved,))
        outs, backs = [], []
        for _ in range(5):
            outs.append(host.move(out).seconds)
            memory.storage[:blocks].zero_()
            backs.append(host.move(back).seconds)
        size = blocks * memory.block_bytes
        yield check.speed("swap out to the host", size / median(outs), "B/s", TO_HOST, GOAL)
        yield check.speed("swap in from the host", size / median(backs), "B/s", TO_DEVICE, GOAL)
        differ = int((memory.storage[:blocks] != before).sum())
        yield Result("numbers changed by a swap", differ, "numbers", goal=0, met=differ == 0)
    finally:
        host.close()


def _scattered(of: int, count: int) -> Extents:
    """`count` blocks of `of` in no order, each by itself."""
    chosen = random.Random(2).sample(range(of), count)
    return tuple((block, 1) for block in chosen)


def _host_seconds(work: Callable[[], object], repeats: int = 9) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)
