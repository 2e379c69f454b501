"""How many prefill workers traffic takes, and when their first tokens come; asks a curve how long.

Whole workers for the work itself, for what the link carries, and so many that 95 of 100 requests
have their first token in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from baton.core.errors import InvalidArgument
from baton_loadtest.planner.asked import Margins, Targets, Traffic
from baton_loadtest.planner.curves import PrefillCurve, duration
from baton_loadtest.planner.waiting import queueing, wait_s

MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """workers, and which need decided how many. mean_s: a prompt keeps a worker busy for. long_s:
    the 95th percentile's prompt, alone. load: workers kept busy. wait_s, first_token_s: at most,
    for 95 of 100 requests. moved_bytes: KV of a mean request. moving_rate: bytes a second that one
    worker's KV grows by while it computes; sent_rate: that it sends, on average."""

    workers: int
    decided_by: str
    mean_s: float
    long_s: float
    tokens_per_s: float
    load: float
    wait_s: float
    first_token_s: float
    moved_bytes: float
    moving_rate: float
    sent_rate: float


def plan_prefill(
    traffic: Traffic, targets: Targets, margins: Margins, curve: PrefillCurve, wire_position: int
) -> PrefillPool:
    """wire_position: bytes of a token's KV as it travels. Raises InvalidArgument for a target that
    no number of workers meets, and for traffic beyond all bounds."""
    prompts = traffic.prompts
    long = round(prompts.p95)
    long_s = curve.alone_s(traffic.cached(long), long)
    if long_s > targets.first_token_s:
        raise InvalidArgument(
            f"cannot be met by any number of workers: a prompt of {long} tokens (the 95th "
            f"percentile) takes {duration(long_s)} with a worker to itself: "
            f"{curve.why(traffic.cached(long), long)}",
            field="first_token_ms",
        )
    mean_s = prompts.average(lambda n: curve.busy_s(traffic.cached(n), n))
    square = prompts.average(lambda n: curve.busy_s(traffic.cached(n), n) ** 2)
    spread = max(0.0, square / mean_s**2 - 1.0) if mean_s else 0.0
    computed = prompts.average(lambda n: n - traffic.cached(n))
    moved = computed * wire_position
    load = traffic.rate * mean_s
    needs = {"work": load / margins.busy}
    if margins.link:
        needs["link"] = traffic.rate * moved / (margins.link * margins.busy)
    decided_by = max(needs, key=lambda need: needs[need])
    if needs[decided_by] > MOST_WORKERS:
        raise InvalidArgument(f"takes more than {MOST_WORKERS:,} prefill workers", field="rate")
    least = max(1, ceil(needs[decided_by]))
    waited = 0.0
    for workers, chance in enumerate(queueing(load), 1):
        if workers < least:
            continue
        waited = wait_s(chance, workers, load, mean_s, spread)
        if waited + long_s <= targets.first_token_s:
            break
        decided_by = "first token"
    return PrefillPool(
        workers=workers,
        decided_by=decided_by,
        mean_s=mean_s,
        long_s=long_s,
        tokens_per_s=computed / mean_s if mean_s else 0.0,
        load=load,
        wait_s=waited,
        first_token_s=waited + long_s,
        moved_bytes=moved,
        moving_rate=moved / mean_s if mean_s else 0.0,
        sent_rate=traffic.rate * moved / workers,
    )


def handover_s(curve: PrefillCurve, first: int, end: int, wire_position: int, link: float) -> float:
    """From a prompt's first token until its KV is all there, where chunks move at `link` bytes a
    second while later ones are computed."""
    compute_s = curve.alone_s(first, end)
    chunk = min(end - first, curve.step_tokens or end - first)
    all_s, last_s = ((count * wire_position / link) for count in (end - first, chunk))
    began_s = compute_s * chunk / (end - first)
    return max(last_s, began_s + all_s - compute_s)
