"""What the device can do at best, measured with torch alone; other sections are shares of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from baton_loadtest.report import Result
from gpucheck.check import Check
from gpucheck.timing import give_back, seconds, settle

READ = "read bandwidth"
COPY = "copy bandwidth"
MATMUL = "matmul rate, bfloat16"
TO_DEVICE = "host to device, pinned"
TO_HOST = "device to host, pinned"


def run(check: Check) -> Iterator[Result]:
    yield from _memory(check)
    give_back(check.device)
    yield from _link(check)
    yield from _launches(check)
    yield from _products(check)


def _memory(check: Check) -> Iterator[Result]:
    """Of a copy, read and written bytes both counted, and of a sum, which only reads."""
    source = torch.randn(1 << 30 if check.on_gpu else 1 << 20, device=check.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), check.device)
    yield Result(COPY, copied, "B/s")
    yield Result(READ, source.nbytes / seconds(source.sum, check.device), "B/s")


def _products(check: Check) -> Iterator[Result]:
    """Operations a second of a square product of random numbers, in each number type."""
    size = 8192 if check.on_gpu else 64
    for kind in ("bfloat16", "float16", "float32"):
        dtype = getattr(torch, kind)
        left, right = (torch.randn(size, size, device=check.device).to(dtype) for _ in range(2))
        taken = seconds(partial(torch.matmul, left, right), check.device)
        yield Result(f"matmul rate, {kind}", 2 * size**3 / taken, "FLOP/s")
    capable = check.on_gpu and torch.cuda.get_device_capability() >= (8, 9)
    if capable:
        kind8 = torch.float8_e4m3fn
        first = torch.randn(size, size, device=check.device).to(kind8)
        # The second one has to be column-major.
        second = torch.randn(size, size, device=check.device).to(kind8).t()
        one = torch.ones(size, 1, device=check.device)

        def product() -> torch.Tensor:
            return torch._scaled_mm(first, second, one, one.t(), out_dtype=torch.bfloat16)

        yield Result(
            "matmul rate, float8 by row", 2 * size**3 / seconds(product, check.device), "FLOP/s"
        )


def _link(check: Check) -> Iterator[Result]:
    """Bytes a second between host and device, from memory that is pinned and that is not."""
    count = 1 << 28 if check.on_gpu else 1 << 20
    there = torch.empty(count, dtype=torch.uint8, device=check.device)
    for name in ("pageable", "pinned"):
        here = torch.ones(count, dtype=torch.uint8, pin_memory=check.on_gpu and name == "pinned")

        def into(here: torch.Tensor = here) -> object:
            return there.copy_(here, non_blocking=True)

        def out(here: torch.Tensor = here) -> object:
            return here.copy_(there, non_blocking=True)

        yield Result(f"host to device, {name}", count / seconds(into, check.device), "B/s")
        yield Result(f"device to host, {name}", count / seconds(out, check.device), "B/s")


def _launches(check: Check) -> Iterator[Result]:
    """What one small kernel costs: the host to launch it, the device to run it out of a graph."""
    number = torch.zeros(1, device=check.device)
    count = 1000

    def many() -> None:
        for _ in range(count):
            number.add_(1.0)

    many()
    settle(check.device)
    began = time.perf_counter()
    many()
    yield Result("launch, host", (time.perf_counter() - began) / count * 1e6, "µs")
    settle(check.device)
    if check.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        taken = seconds(graph.replay, check.device)
        yield Result("kernel in a graph", taken / count * 1e6, "µs")
