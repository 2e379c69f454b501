"""A fleet for traffic and targets: both pools, their ratio, and what a token costs; asks curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from math import ceil, exp, isfinite, log, sqrt
from statistics import NormalDist, fmean

from baton.core.errors import InvalidArgument
from baton_loadtest.planner.curves import DecodeCurve, PrefillCurve, duration

# Lengths, how long prompts or outputs are, from a mean and a 95th percentile.
#
# Taken as log-normal, which real chat, code and agent traffic resembles: many short, few very long.
# What grows with a length's square depends on the few, so a mean alone would flatter a plan.


_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
MOST_SPREAD = exp(_P95 * _P95 / 2)
"""A log-normal's 95th percentile is at most so many times its mean."""

_PARTS = 400


@dataclass(frozen=True)
class Lengths:
    """Tokens. Raises InvalidArgument naming `what` for what no such lengths have."""

    mean: float
    p95: float
    what: str = "lengths"

    def __post_init__(self) -> None:
        if not (isfinite(self.mean) and isfinite(self.p95) and self.mean >= 1):
            raise InvalidArgument("the mean must be at least one token", field=self.what)
        if self.p95 < self.mean:
            raise InvalidArgument("the 95th percentile is below the mean", field=self.what)
        if self.p95 > MOST_SPREAD * self.mean:
            raise InvalidArgument(
                f"the 95th percentile is more than {MOST_SPREAD:.2f} times the mean: a few are so "
                "long that they are better planned apart",
                field=self.what,
            )

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithm; 0 where all are equally long."""
        return _P95 - sqrt(max(0.0, _P95 * _P95 - 2 * log(self.p95 / self.mean)))

    @property
    def weighted_mean(self) -> float:
        """Of the length that a token picked at random belongs to: E[n²] / E[n]."""
        return self.mean * exp(self.spread**2)

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Lengths that are equally likely, in order: the mean of each part of the distribution, so
        that they have its mean, but for rounding, and all but the end of its tail."""
        if not self.spread:
            return (round(self.mean),)
        # What a log-normal's shorter lengths add to its mean is normal again, moved by its spread.
        ends = (_NORMAL.inv_cdf(part / _PARTS) for part in range(1, _PARTS))
        below = [0.0, *(_NORMAL.cdf(end - self.spread) for end in ends), 1.0]
        shares = (upper - lower for lower, upper in pairwise(below))
        return tuple(max(1, round(share * _PARTS * self.mean)) for share in shares)

    def average(self, value: Callable[[int], float]) -> float:
        """Of what a length takes."""
        return fmean(value(length) for length in self.points)


# What a fleet is planned for: traffic, targets and margins.


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests a second. shared_prefix: share of each prompt that workers have cached, on
    either side of the hand-over."""

    rate: float
    prompts: Lengths
    outputs: Lengths
    shared_prefix: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise InvalidArgument("must be more than 0 requests a second", field="rate")
        if not 0.0 <= self.shared_prefix < 1.0:
            raise InvalidArgument("must be from 0 to below 1", field="shared_prefix")

    def cached(self, prompt: int) -> int:
        """Positions of a prompt that need neither computing nor moving; the last always does."""
        return min(prompt - 1, int(self.shared_prefix * prompt))


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds. first_token: for 95 of 100 requests, from when the prompt reaches the prefill pool.
    between_tokens: a step of decode."""

    first_token_s: float
    between_tokens_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isfinite(value) and value > 0):
                name = field.name.removesuffix("_s") + "_ms"
                raise InvalidArgument("must be more than 0", field=name)


@dataclass(frozen=True, slots=True)
class Margins:
    """busy: share of a worker's speed, and of a link's, that is planned with; the rest is for
    bursts. link: bytes a second into or out of a worker; 0: not known, and not looked at."""

    busy: float
    link: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.busy < 1.0:
            raise InvalidArgument("must be above 0 and below 1", field="busy")


# How long requests wait for one of several workers, a formula.
#
# Erlang's formula for arrivals at random and one queue, and the usual correction for service times
# that do not spread as an exponential's do. Baton's router gives a request to the worker that has
# least to do, which comes close to one queue.


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


# How many prefill workers traffic takes, and when their first tokens come; asks a curve how long.
#
# Whole workers for the work itself, for what the link carries, and so many that 95 of 100 requests
# have their first token in time.


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


# How many decode workers traffic takes, and how many sequences each runs; asks a curve how long.
#
# A worker's batch is bounded by its KV, by the target between tokens and by what it may run at all.


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


HOUR_S = 3600.0
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Fleet:
    """decode_per_prefill: decode workers that keep up with one prefill worker, both as busy as is
    planned. handover_s: of the 95th percentile's prompt, from its first token on; None without a
    link that is known."""

    prefill: PrefillPool
    decode: DecodePool
    decode_per_prefill: float
    handover_s: float | None

    @property
    def workers(self) -> int:
        return self.prefill.workers + self.decode.workers

    def cost_per_million(self, traffic: Traffic, price_per_hour: float) -> tuple[float, float]:
        """Of all tokens, and of output alone with everything charged to it. price_per_hour: of a
        worker."""
        price = self.workers * price_per_hour / HOUR_S * MILLION / traffic.rate
        outputs = traffic.outputs.mean
        return price / (traffic.prompts.mean + outputs), price / outputs


def plan_fleet(
    traffic: Traffic,
    targets: Targets,
    margins: Margins,
    curves: tuple[PrefillCurve, DecodeCurve],
    room: KvRoom,
    wire_position: int,
) -> Fleet:
    """room: of a decode worker. wire_position: bytes of a token's KV as it travels. Raises
    InvalidArgument naming the target that cannot be met, and why."""
    prefilling, decoding = curves
    prefill = plan_prefill(traffic, targets, margins, prefilling, wire_position)
    decode = plan_decode(traffic, targets, margins, decoding, room, prefill.moved_bytes)
    long = round(traffic.prompts.p95)
    return Fleet(
        prefill,
        decode,
        (traffic.outputs.mean - 1) / decode.tokens_per_s / prefill.mean_s if prefill.mean_s else 0,
        handover_s(prefilling, traffic.cached(long), long, wire_position, margins.link)
        if margins.link
        else None,
    )
