"""How many workers each pool needs for the predicted load.

In: signals of the fleet, and the time. Out: a number of workers per pool.

The rule uses what binds, and early: waiting prompt tokens are work still to be done, growing KV
shows what decode will hold once a worker that is requested now has started, and requests that were
refused would run if there were workers. Utilization shows none of these: decode is as busy with
one sequence as with a hundred, and a pool whose work is refused looks as it does at its limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from statistics import fmean

from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed

FULL = 0.9
"""Share of its sequences, or of its KV, from which a decode pool is what requests wait for."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most workers of a pool, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        if not 0 <= self.least <= self.most:
            raise InvalidArgument("must be from 0 to the most", field="least")

    def within(self, workers: float) -> int:
        if workers >= self.most:
            return self.most
        return max(self.least, ceil(workers - 1e-9))


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """The targets of scaling. Raises InvalidArgument."""

    first_token_s: float
    """The target in seconds."""
    between_tokens_s: float
    """The target in seconds."""
    busy: float = 0.7
    """The planned share of a worker's time and of its KV."""
    lead_s: float = 30.0
    """From the request for a worker until it takes work."""
    trend_s: float = 20.0
    """The period over which growth is measured and over which what waits is averaged."""
    hold_s: float = 300.0
    """A pool keeps the most that it needed within this period, so that it does not shrink between
    two bursts."""

    def __post_init__(self) -> None:
        for name in ("first_token_s", "between_tokens_s", "trend_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0.0):
                raise InvalidArgument("must be more than 0", field=name)
        for name in ("lead_s", "hold_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise InvalidArgument("must not be below 0", field=name)
        if not 0.0 < self.busy <= 1.0:
            raise InvalidArgument("must be above 0, at most 1", field="busy")


@dataclass(frozen=True, slots=True)
class PrefillSignals:
    """Work of the prefill pool, in seconds of one worker's time."""

    arrived_s: float
    """All prefill work that ever arrived, refused work included."""
    queued_s: float
    """The work that waits on prefill workers and, unless the decode pool is full, in routers: what
    waits for decode would not start sooner with more prefill workers."""


@dataclass(frozen=True, slots=True)
class DecodeSignals:
    """The state of the decode pool."""

    rows: float
    """Sequences that run or wait to run, on all workers."""
    positions: float
    """KV positions that they hold."""
    speed: WorkerSpeed
    """Of one worker."""
    room: int
    """Positions that one worker holds."""
    places: int = 0
    """Most sequences that one worker runs; 0: no limit."""
    workers: int = 1
    """That serve."""
    placed: float = 0.0
    """Requests that ever got workers."""
    refused: float = 0.0
    """Requests that were ever refused for lack of capacity."""
    waiting: float = 0.0
    """Requests that wait in routers for workers."""
    prefills: int = 0
    """Prefill workers that serve; 0: decode workers compute the prompts."""

    @property
    def is_full(self) -> bool:
        """Whether requests wait for this pool."""
        rows, positions = (FULL * self.workers * most for most in (self.places, self.room))
        return 0 < rows <= self.rows or 0 < positions <= self.positions


class ScalingRule:
    """The rule of one fleet. Call `prefill` and `decode` repeatedly, with times that grow."""

    def __init__(self, policy: ScalingPolicy, prefill: Bounds, decode: Bounds) -> None:
        self._policy = policy
        self._arrived, self._positions, self._rows, self._placed, self._refused = (
            Trend(policy.trend_s) for _ in range(5)
        )
        self._queued, self._waiting = Mean(policy.trend_s), Mean(policy.trend_s)
        self._seen_refused = self._refused_for_decode = 0.0
        self._rows_each: float | None = None
        """Running sequences for each request that was placed within the period; None: unknown."""
        self._prefill = _Held(prefill, policy.hold_s)
        self._decode = _Held(decode, policy.hold_s)

    def prefill(self, now: float, signals: PrefillSignals) -> int:
        """Returns the workers for the arriving work and for finishing the queue within the
        target."""
        policy = self._policy
        coming = max(0.0, self._arrived.per_second(now, signals.arrived_s))
        queued_s = self._queued.of(now, signals.queued_s)
        return self._prefill.target(now, coming / policy.busy + queued_s / policy.first_token_s)

    def decode(self, now: float, signals: DecodeSignals) -> int:
        """Returns the workers for the KV and the step time that are predicted for when a worker
        that is requested now has started, with all requests that wait or are refused now."""
        policy, speed = self._policy, signals.speed
        missing = self._missing(now, signals)
        positions = self._foreseen(self._positions, now, signals.positions, signals.rows)
        rows = self._foreseen(self._rows, now, signals.rows, signals.rows)
        if signals.rows:
            positions += missing * signals.positions / signals.rows
            rows += missing
        needs = [positions / (policy.busy * signals.room) if signals.room else 0.0]
        if signals.places:
            needs.append(rows / (policy.busy * signals.places))
        # Rows and positions spread over workers; the step's own time is per worker. A target that
        # one sequence alone would miss, more workers would not meet either.
        work_s = rows * speed.row_s + positions * speed.context_s
        left_s = policy.between_tokens_s - speed.step_s
        if work_s and work_s <= rows * left_s:
            needs.append(work_s / left_s)
        return self._decode.target(now, max(needs))

    def _missing(self, now: float, signals: DecodeSignals) -> float:
        """Returns the sequences that would run besides if no request waited or were refused.

        By Little's law a request adds as many, on average, as run for each request that is placed
        in the same period; and never more than itself. So requests that wait for prefill add the
        little that they will be on decode, and those that wait for decode add all of it.

        What is refused while decode has room was refused for lack of prefill, and counts each time
        that a client tries again. It adds nothing: decode is seen to grow once prefill has grown.
        """
        if signals.is_full or not signals.prefills:
            self._refused_for_decode += signals.refused - self._seen_refused
        self._seen_refused = signals.refused
        period_s = self._policy.trend_s
        placed = period_s * max(0.0, self._placed.per_second(now, signals.placed))
        refused = period_s * max(0.0, self._refused.per_second(now, self._refused_for_decode))
        if placed:
            self._rows_each = min(1.0, signals.rows / placed)
        each = float(signals.is_full) if self._rows_each is None else self._rows_each
        return each * (self._waiting.of(now, signals.waiting) + refused)

    def _foreseen(self, trend: Trend, now: float, value: float, rows: float) -> float:
        """Returns what a value of so many sequences will be when a worker that is requested now has
        started, by its growth beyond what chance explains: a count of requests that arrive at
        random moves by the root of twice itself (a standard deviation) while it stays what it is.
        """
        by_chance = value * sqrt(2.0 / max(1.0, rows)) / self._policy.trend_s
        return value + self._policy.lead_s * max(0.0, trend.per_second(now, value) - by_chance)


class Trend:
    """The growth of a value over the last `over_s` seconds."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._known: deque[tuple[float, float]] = deque()

    def per_second(self, now: float, value: float) -> float:
        """Returns the growth per second; 0 at first. now: not before the last call's."""
        known = self._known
        known.append((now, value))
        while len(known) > 2 and known[1][0] <= now - self._over_s:
            known.popleft()
        then, before = known[0]
        return (value - before) / (now - then) if now > then else 0.0


class Mean:
    """The mean of a value over the readings of the last `over_s` seconds."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._known: deque[tuple[float, float]] = deque()

    def of(self, now: float, value: float) -> float:
        """Returns the mean with this reading. now: not before the last call's."""
        known = self._known
        known.append((now, value))
        while known[0][0] < now - self._over_s:
            known.popleft()
        return fmean(value for _, value in known)


class _Held:
    """A target that grows at once and shrinks to the most that was needed within hold_s."""

    def __init__(self, bounds: Bounds, hold_s: float) -> None:
        self._bounds, self._hold_s = bounds, hold_s
        self._falling: deque[tuple[float, int]] = deque()
        """Past targets that no later one reached."""

    def target(self, now: float, need: float) -> int:
        falling, wanted = self._falling, self._bounds.within(need)
        while falling and falling[-1][1] <= wanted:
            falling.pop()
        falling.append((now, wanted))
        while falling[0][0] < now - self._hold_s:
            falling.popleft()
        return falling[0][1]
