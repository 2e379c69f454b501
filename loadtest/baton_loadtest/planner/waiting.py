"""How long requests wait for one of several workers, a formula.

Erlang's formula for arrivals at random and one queue, and the usual correction for service times
that do not spread as an exponential's do. Baton's router gives a request to the worker that has
least to do, which comes close to one queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

P95 = 0.05


def queueing(load: float) -> Iterator[float]:
    """The chance that a request waits at all, with 1, 2, 3 … workers. load: how many workers the
    work keeps busy. 1 while they are too few."""
    blocked, workers = 1.0, 0
    while True:
        workers += 1
        blocked = load * blocked / (workers + load * blocked)
        if workers <= load:
            yield 1.0
        else:
            yield workers * blocked / (workers - load * (1.0 - blocked))


def wait_s(chance: float, workers: int, load: float, service_s: float, spread: float) -> float:
    """What a request waits at most, but for one in twenty. Infinite with too few workers.

    chance: of waiting at all. service_s: mean. spread: of service times, variance over mean².
    """
    if workers <= load:
        return float("inf")
    if chance <= P95:
        return 0.0
    return log(chance / P95) * service_s * (1.0 + spread) / 2.0 / (workers - load)
