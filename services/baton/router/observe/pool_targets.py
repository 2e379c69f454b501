"""PoolTargets, how many workers of each pool core's rule asks for, by what this router sees.

Starts and stops none: that is for who reads it (an HPA, KEDA). Looks whenever it is read, so it
must be read every now and then to know what grows. What arrives, and waits, here is taken to do so
at each of the routers; what workers hold is told by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.core.routing.routing import WorkerSnapshot
from baton.core.routing.scaling import (
    Bounds,
    DecodeSignals,
    PrefillSignals,
    ScalingPolicy,
    ScalingRule,
)
from baton.core.routing.speed import WorkerSpeed

MOST = 1000
"""Stands for more than anybody has: who scales has bounds of its own."""

PROMPT = 1024
"""Tokens of the prompt by which a token's share of a worker's time is told."""

Snapshots = Callable[[], Sequence[WorkerSnapshot]]


class PoolTargets:
    """waiting: input tokens of each attempt that waits here. arrived: prompt tokens so far. now: in
    seconds, never going back."""

    def __init__(
        self,
        policy: ScalingPolicy,
        prefills: Snapshots,
        decodes: Snapshots,
        waiting: Callable[[], Iterable[int]],
        arrived: Callable[[], float],
        routers: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self._rule = ScalingRule(policy, Bounds(0, MOST), Bounds(1, MOST))
        self._prefills, self._decodes, self._waiting = prefills, decodes, waiting
        self._arrived, self._routers, self._now = arrived, routers, now
        self._arrived_tokens = arrived()
        self._arrived_s = 0.0

    def read(self) -> dict[tuple[str, ...], float]:
        """By pool; without those of which nothing is known yet."""
        now, prefills, decodes = self._now(), self._prefills(), self._decodes()
        found: dict[tuple[str, ...], float] = {}
        # With no prefill worker there is still somebody who knows how long prompts take.
        speed = _speed(prefills) or _speed(decodes)
        if speed is not None:
            found["prefill",] = float(self._rule.prefill(now, self._prefill(prefills, speed)))
        if decodes:
            found["decode",] = float(self._rule.decode(now, _decode(decodes)))
        return found

    def _prefill(self, workers: Sequence[WorkerSnapshot], speed: WorkerSpeed) -> PrefillSignals:
        routers, tokens = self._routers(), self._arrived()
        came = routers * (tokens - self._arrived_tokens)
        self._arrived_tokens = tokens
        self._arrived_s += came * speed.queue_s(PROMPT, 1) / PROMPT
        waiting = list(self._waiting())
        queued = routers * sum(waiting) + sum(one.load.waiting_tokens for one in workers)
        prompts = routers * len(waiting) + sum(one.load.waiting_sequences for one in workers)
        return PrefillSignals(self._arrived_s, speed.queue_s(queued, prompts))


def _speed(workers: Sequence[WorkerSnapshot]) -> WorkerSpeed | None:
    """Of a worker in the middle."""
    known = [one.load.speed for one in workers if one.load.speed.prefills]
    known.sort(key=lambda speed: speed.queue_s(PROMPT, 1))
    return known[len(known) // 2] if known else None


def _decode(workers: Sequence[WorkerSnapshot]) -> DecodeSignals:
    """What all hold, and a worker in the middle."""
    known = sorted((one.load.speed for one in workers), key=lambda speed: speed.step_s)
    return DecodeSignals(
        sum(one.load.running_sequences + one.load.waiting_sequences for one in workers),
        sum((one.num_blocks - one.load.free_blocks) * one.block_size for one in workers),
        known[len(known) // 2],
        min(one.num_blocks * one.block_size for one in workers),
        min(one.max_sequences for one in workers),
    )
