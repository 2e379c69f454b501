"""How many decode workers traffic takes, and how many sequences each runs; asks a curve how long.

A worker's batch is bounded by its KV, by the target between tokens and by what it may run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from baton.core.errors import InvalidArgument
from baton_loadtest.planner.asked import Margins, Targets, Traffic
from baton_loadtest.planner.curves import DecodeCurve, duration
from baton_loadtest.planner.prefill_pool import MOST_WORKERS

_SEARCHED = 1 << 20


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Of one worker. positions: whose KV fits. sequences: it runs at most."""

    positions: int
    sequences: int


@dataclass(frozen=True, slots=True)
class DecodePool:
    """workers, and which need decided how many. context: mean positions of a running sequence;
    grown: that one comes to. fits: sequences whose KV fits. in_time: that meet the target, at most
    1 << 20. batch: what a worker may run, bounded by limited_by; full_step_s, tokens_per_s: then.
    running, step_s: of a worker, on average, under the traffic. received_rate: bytes a second."""

    workers: int
    decided_by: str
    context: float
    grown: float
    fits: int
    in_time: int
    batch: int
    limited_by: str
    full_step_s: float
    tokens_per_s: float
    running: float
    step_s: float
    received_rate: float


def plan_decode(
    traffic: Traffic,
    targets: Targets,
    margins: Margins,
    curve: DecodeCurve,
    room: KvRoom,
    moved_bytes: float,
) -> DecodePool:
    """moved_bytes: KV of a mean request. Raises InvalidArgument for a target that no batch meets,
    for requests that do not fit, and for traffic beyond all bounds."""
    prompt = traffic.prompts.mean
    long = round(traffic.prompts.p95 + traffic.outputs.p95)
    if long > room.positions:
        raise InvalidArgument(
            f"a request of {long} tokens (the 95th percentiles) does not fit: a decode worker has "
            f"room for the KV of {room.positions}",
            field="output",
        )
    # Longer outputs run longer, so a running sequence is more likely one of theirs.
    output = traffic.outputs.weighted_mean
    context, grown = prompt + output / 2, prompt + output
    alone_s = curve.step_s(1, context)
    if alone_s > targets.between_tokens_s:
        raise InvalidArgument(
            "cannot be met by any number of workers: one token of one sequence takes "
            f"{duration(alone_s)} with a worker to itself: {curve.why(1, context)}",
            field="between_tokens_ms",
        )
    limits = {
        "KV": max(1, int(room.positions / grown)),
        "between tokens": _most(lambda rows: curve.step_s(rows, context), targets.between_tokens_s),
        "sequences": room.sequences,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    batch = limits[limited_by]
    full_step_s = curve.step_s(batch, context)
    tokens_per_s = batch / full_step_s
    # The first token is prefill's.
    tokens = traffic.rate * (traffic.outputs.mean - 1)
    needs = {"work": tokens / (tokens_per_s * margins.busy)}
    if margins.link:
        needs["link"] = traffic.rate * moved_bytes / (margins.link * margins.busy)
    decided_by = max(needs, key=lambda name: needs[name])
    if needs[decided_by] > MOST_WORKERS:
        raise InvalidArgument(f"takes more than {MOST_WORKERS:,} decode workers", field="rate")
    workers = max(1, ceil(needs[decided_by]))
    running = _running(lambda rows: curve.step_s(rows, context), tokens / workers, batch)
    return DecodePool(
        workers=workers,
        decided_by=decided_by,
        context=context,
        grown=grown,
        fits=limits["KV"],
        in_time=limits["between tokens"],
        batch=batch,
        limited_by=limited_by,
        full_step_s=full_step_s,
        tokens_per_s=tokens_per_s,
        running=running,
        step_s=curve.step_s(running, context),
        received_rate=traffic.rate * moved_bytes / workers,
    )


def _most(step_s: Callable[[float], float], within_s: float) -> int:
    """The largest batch whose step takes no longer; a step of one does not."""
    low, high = 1, _SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= within_s:
            low = middle
        else:
            high = middle - 1
    return low


def _running(step_s: Callable[[float], float], tokens_per_s: float, most: float) -> float:
    """How many sequences run on average, so that their steps make so many tokens a second: more of
    them always make more."""
    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        if middle < tokens_per_s * step_s(middle):
            low = middle
        else:
            high = middle
    return high
