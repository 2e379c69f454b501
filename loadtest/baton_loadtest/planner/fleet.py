"""Plans a fleet for traffic and targets: both pools, their ratio, and the cost of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from math import ceil, exp, isfinite, log, sqrt
from statistics import NormalDist, fmean

from baton_loadtest.planner.curves import DecodeCurve, PrefillCurve, duration
from batonlm.core.errors import InvalidArgument

_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
MOST_SPREAD = exp(_P95 * _P95 / 2)
"""The largest possible ratio of a log-normal's 95th percentile to its mean."""

_PARTS = 400


@dataclass(frozen=True)
class Lengths:
    """The distribution of prompt or output lengths, in tokens, from mean and 95th percentile.

    It is log-normal, which real chat, code and agent traffic resembles: many short, few very long
    ones. The few dominate costs that grow with the square of a length, so a mean alone would make a
    plan too optimistic. Raises InvalidArgument with `what` for impossible values.
    """

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
        """Standard deviation of the logarithm; 0 if all have the same length."""
        return _P95 - sqrt(max(0.0, _P95 * _P95 - 2 * log(self.p95 / self.mean)))

    @property
    def weighted_mean(self) -> float:
        """Mean length of the sequence to which a random token belongs: E[n²] / E[n]."""
        return self.mean * exp(self.spread**2)

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Equally likely lengths in order: the mean of each part of the distribution. They have
        its mean, up to rounding, and its tail except for the end."""
        if not self.spread:
            return (round(self.mean),)
        # The shorter lengths' part of a log-normal's mean is again normal, shifted by its spread.
        ends = (_NORMAL.inv_cdf(part / _PARTS) for part in range(1, _PARTS))
        below = [0.0, *(_NORMAL.cdf(end - self.spread) for end in ends), 1.0]
        shares = (upper - lower for lower, upper in pairwise(below))
        return tuple(max(1, round(share * _PARTS * self.mean)) for share in shares)

    def average(self, value: Callable[[int], float]) -> float:
        """Returns the mean of a function of the length."""
        return fmean(value(length) for length in self.points)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic to plan for."""

    rate: float
    """Requests per second."""
    prompts: Lengths
    outputs: Lengths
    shared_prefix: float = 0.0
    """Share of each prompt that is cached on workers of both roles."""

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise InvalidArgument("must be more than 0 requests a second", field="rate")
        if not 0.0 <= self.shared_prefix < 1.0:
            raise InvalidArgument("must be from 0 to below 1", field="shared_prefix")

    def cached(self, prompt: int) -> int:
        """Returns the positions of a prompt that need neither computation nor transfer; the last
        position always needs both."""
        return min(prompt - 1, int(self.shared_prefix * prompt))


@dataclass(frozen=True, slots=True)
class Targets:
    """The latencies to meet."""

    first_token_s: float
    """For 95 of 100 requests, from the prompt's arrival at the prefill pool."""
    between_tokens_s: float
    """Duration of a decode step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isfinite(value) and value > 0):
                name = field.name.removesuffix("_s") + "_ms"
                raise InvalidArgument("must be more than 0", field=name)


@dataclass(frozen=True, slots=True)
class Margins:
    """The reserves of the plan."""

    busy: float
    """Share of a worker's speed, and of a link's, that is used; the rest is for bursts."""
    link: float = 0.0
    """Bytes per second into or out of a worker; 0: unknown and ignored."""

    def __post_init__(self) -> None:
        if not 0.0 < self.busy < 1.0:
            raise InvalidArgument("must be above 0 and below 1", field="busy")


P95 = 0.05


def queueing(load: float) -> Iterator[float]:
    """Yields the probability that a request waits, with 1, 2, 3 … workers; 1 with too few.

    This is Erlang's formula for random arrivals and one queue. Baton's router approaches one queue,
    because it gives each request to the least loaded worker. load: number of workers that the work
    keeps busy.
    """
    blocked, workers = 1.0, 0
    while True:
        workers += 1
        blocked = load * blocked / (workers + load * blocked)
        if workers <= load:
            yield 1.0
        else:
            yield workers * blocked / (workers - load * (1.0 - blocked))


def wait_s(chance: float, workers: int, load: float, service_s: float, spread: float) -> float:
    """Returns the waiting time that 19 of 20 requests do not exceed; infinite with too few workers.

    It includes the usual correction for service times that are not exponential. chance: of waiting
    at all. service_s: mean. spread: of service times, variance / mean².
    """
    if workers <= load:
        return float("inf")
    if chance <= P95:
        return 0.0
    return log(chance / P95) * service_s * (1.0 + spread) / 2.0 / (workers - load)


MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The planned prefill workers."""

    workers: int
    decided_by: str
    """What determined the number of workers."""
    mean_s: float
    """How long a mean prompt keeps a worker busy."""
    long_s: float
    """Duration of the 95th percentile's prompt, alone."""
    tokens_per_s: float
    load: float
    """Number of busy workers."""
    wait_s: float
    """Not exceeded by 95 of 100 requests."""
    first_token_s: float
    """Not exceeded by 95 of 100 requests."""
    moved_bytes: float
    """KV of a mean request."""
    moving_rate: float
    """Bytes per second by which a worker's KV grows while it computes."""
    sent_rate: float
    """Bytes per second that a worker sends on average."""


def plan_prefill(
    traffic: Traffic,
    targets: Targets,
    margins: Margins,
    curve: PrefillCurve,
    wire_position: int,
    state: int,
) -> PrefillPool:
    """Returns the smallest pool that suffices for the work, for the link, and for 95 of 100 first
    tokens in time. wire_position: bytes of a token's KV on the wire. state: positions more that
    move with each request. Raises InvalidArgument for a target that no number of workers meets, and
    for excessive traffic."""
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
    moved = (computed + state) * wire_position
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


def handover_s(
    curve: PrefillCurve, first: int, end: int, wire_position: int, link: float, state: int = 0
) -> float:
    """Returns the time from a prompt's first token until all its KV has arrived. Chunks are sent at
    `link` bytes per second while later ones are computed; `state` positions more, of the sequence's
    state, follow the last one."""
    compute_s = curve.alone_s(first, end)
    chunk = min(end - first, curve.step_tokens or end - first)
    all_s, last_s = (((count + state) * wire_position / link) for count in (end - first, chunk))
    began_s = compute_s * chunk / (end - first)
    return max(last_s, began_s + all_s - compute_s)


_SEARCHED = 1 << 20


@dataclass(frozen=True, slots=True)
class KvRoom:
    """The capacity of one worker."""

    positions: int
    """Positions whose KV fits."""
    sequences: int
    """Maximum number of running sequences."""
    state: int = 0
    """Positions whose room each sequence's state takes."""


@dataclass(frozen=True, slots=True)
class DecodePool:
    """The planned decode workers."""

    workers: int
    decided_by: str
    """What determined the number of workers."""
    context: float
    """Mean number of positions of a running sequence."""
    grown: float
    """Positions of a sequence at its end."""
    fits: int
    """Number of sequences whose KV fits."""
    in_time: int
    """Number of sequences that meet the target, at most 1 << 20."""
    batch: int
    """Number of sequences that a worker may run."""
    limited_by: str
    """What limits the batch."""
    full_step_s: float
    """Step time of a full batch."""
    tokens_per_s: float
    """Speed with a full batch."""
    running: float
    """Mean number of running sequences of a worker under the traffic."""
    step_s: float
    """Mean step time under the traffic."""
    received_rate: float
    """Bytes per second that a worker receives."""


def plan_decode(
    traffic: Traffic,
    targets: Targets,
    margins: Margins,
    curve: DecodeCurve,
    room: KvRoom,
    moved_bytes: float,
) -> DecodePool:
    """Returns the smallest pool for the traffic. KV memory, the target between tokens and the
    maximum number of sequences limit a worker's batch. moved_bytes: KV of a mean request. Raises
    InvalidArgument for a target that no batch meets, for requests that do not fit, and for
    excessive traffic."""
    prompt = traffic.prompts.mean
    long = round(traffic.prompts.p95 + traffic.outputs.p95)
    if long + room.state > room.positions:
        raise InvalidArgument(
            f"a request of {long} tokens (the 95th percentiles) does not fit: a decode worker has "
            f"room for the KV of {room.positions - room.state}",
            field="output",
        )
    # Longer outputs run longer, so they are overrepresented among running sequences.
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
        "KV": max(1, int(room.positions / (grown + room.state))),
        "between tokens": _most(lambda rows: curve.step_s(rows, context), targets.between_tokens_s),
        "sequences": room.sequences,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    batch = limits[limited_by]
    full_step_s = curve.step_s(batch, context)
    tokens_per_s = batch / full_step_s
    # Prefill makes the first token.
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
    """Returns the largest batch whose step is within a time. A batch of one always is."""
    low, high = 1, _SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= within_s:
            low = middle
        else:
            high = middle - 1
    return low


def _running(step_s: Callable[[float], float], tokens_per_s: float, most: float) -> float:
    """Returns the mean number of sequences whose steps make so many tokens per second, which grows
    with their number."""
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
    """The planned fleet."""

    prefill: PrefillPool
    decode: DecodePool
    decode_per_prefill: float
    """Number of decode workers that keep up with one prefill worker, both as busy as planned."""
    handover_s: float | None
    """For the 95th percentile's prompt, from its first token on; None if the link is unknown."""

    @property
    def workers(self) -> int:
        return self.prefill.workers + self.decode.workers

    def cost_per_million(self, traffic: Traffic, price_per_hour: float) -> tuple[float, float]:
        """Returns the cost of a million tokens, and of a million output tokens if they bear all of
        it. price_per_hour: of a worker."""
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
    """room: of a decode worker. wire_position: bytes of a token's KV on the wire. Raises
    InvalidArgument with the target that cannot be met, and why."""
    prefilling, decoding = curves
    prefill = plan_prefill(traffic, targets, margins, prefilling, wire_position, room.state)
    decode = plan_decode(traffic, targets, margins, decoding, room, prefill.moved_bytes)
    long = round(traffic.prompts.p95)
    return Fleet(
        prefill,
        decode,
        (traffic.outputs.mean - 1) / decode.tokens_per_s / prefill.mean_s if prefill.mean_s else 0,
        handover_s(prefilling, traffic.cached(long), long, wire_position, margins.link, room.state)
        if margins.link
        else None,
    )
