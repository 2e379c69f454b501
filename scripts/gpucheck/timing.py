"""Times work on a device: with a GPU's own events, or with the host's clock in a rehearsal."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpucheck.figures import median


class Mark:
    """A point of the current stream's work, or of the host's time on a CPU."""

    def __init__(self, device: str):
        self._event: torch.cuda.Event | None = None
        self._host_s = 0.0
        if device == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host_s = time.perf_counter()

    def seconds_to(self, later: Mark) -> float:
        """Only after `settle`."""
        if self._event is None or later._event is None:
            return later._host_s - self._host_s
        return float(self._event.elapsed_time(later._event)) / 1e3


def settle(device: str) -> None:
    """Waits until the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def give_back(device: str) -> None:
    """Returns unused memory to the device, for what allocates beside torch or next."""
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds(work: Callable[[], object], device: str, repeats: int = 15) -> float:
    """The median over repeats, after three runs that do not count."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        began = Mark(device)
        work()
        times.append((began, Mark(device)))
    settle(device)
    return median(began.seconds_to(ended) for began, ended in times)
