"""Times work on a GPU with events of its own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpucheck.figures import median


def event() -> torch.cuda.Event:
    """One that is recorded at this point of the current stream."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record()
    return made


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """The median over repeats, after three runs that do not count."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        began = event()
        work()
        ended = event()
        times.append((began, ended))
    torch.cuda.synchronize()
    return median(began.elapsed_time(ended) / 1e3 for began, ended in times)


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written ones both counted."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def read_bandwidth() -> float:
    """Bytes a second of a large sum, which only reads."""
    source = torch.randn(1 << 30, device="cuda")
    return source.nbytes / seconds(lambda: source.sum())


def matmul_rate() -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right)
