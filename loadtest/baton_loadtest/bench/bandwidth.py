"""How fast this process can read memory, which no decode step at batch 1 can outrun."""

from __future__ import annotations

import time
from collections.abc import Callable

REPEATS = 5


def read_bandwidth(megabytes: int) -> float:
    """Bytes a second: the best of sums and of matrix-vector products over so much float32.

    With the threads that torch has now; more memory than the caches hold means memory is measured.
    """
    import torch

    width = 4096
    matrix = torch.ones(max(1, megabytes * 250_000 // width), width)
    vector = torch.ones(width)
    works: list[Callable[[], object]] = [matrix.sum, lambda: torch.mv(matrix, vector)]
    best = float("inf")
    for work in works:
        for _ in range(REPEATS):
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
    return matrix.numel() * matrix.element_size() / best
