"""A router's reaction to failures: circuit breakers, quarantine, a retry budget, a steady verdict.

In: outcomes of attempts, and readings of the caller's monotonic clock, in seconds. Out: which
workers get no new attempts, which requests run isolated, whether a retry is allowed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_IN_A_ROW = 3
"""Consecutive failures that trip a breaker."""
WINDOW = 20
"""Most recent outcomes that are kept per worker."""
FEWEST = 10
"""Fewest outcomes from which a share of failures is computed."""
MAX_LOST = 0.5
"""The share of failures that trips a breaker."""
MOMENT_S = 0.1
"""Failures within this many seconds count as one."""
OPEN_S = 0.5
"""Seconds for which a breaker stays open at first."""
LONGEST_OPEN_S = 4.0
"""The longest time that a breaker stays open. Recovered capacity is used within five seconds; until
then each probe costs an attempt."""
FORGET_S = 60.0
"""A breaker that stays closed for this many seconds starts with OPEN_S again."""
MAX_KNOWN = 4096
"""Most instance ids whose breakers are kept."""


class BreakerState(Enum):
    """The attempts that a worker gets."""

    CLOSED = auto()
    """All attempts that are placed on it."""
    OPEN = auto()
    """None."""
    HALF_OPEN = auto()
    """The next attempt, as a probe."""
    PROBING = auto()
    """None besides the probe that it runs."""


class BreakerEvent(Enum):
    """An event of a breaker."""

    TRIPPED = auto()
    """Too many attempts failed."""
    COOLED = auto()
    """The breaker was open for long enough."""
    PLACED = auto()
    """An attempt is placed on the worker."""
    SUCCESS = auto()
    """An attempt received a token or an answer from the worker."""
    FAILURE = auto()
    """An attempt failed on the worker."""
    LEFT = auto()
    """The probe ended with neither."""


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.CLOSED, _E.TRIPPED): _S.OPEN,
    (_S.OPEN, _E.COOLED): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.PLACED): _S.PROBING,
    (_S.PROBING, _E.SUCCESS): _S.CLOSED,
    (_S.PROBING, _E.FAILURE): _S.OPEN,
    (_S.PROBING, _E.LEFT): _S.HALF_OPEN,
}
"""Other events change nothing: attempts that still run on a worker whose breaker opened are no
probes."""


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: a worker that fails attempts gets no new ones for a while.

         CLOSED ──TRIPPED──► OPEN ──COOLED──► HALF_OPEN ──PLACED──► PROBING ──SUCCESS──► CLOSED
                                                  ▲                  │  └──FAILURE──► OPEN, longer
                                                  └───────LEFT───────┘

    It trips after consecutive failures, or when half of the recent attempts failed (outlier
    ejection). Failures at the same moment count once, because a broken stream fails all its
    attempts. A worker that died needs no breaker: its next instance id is another worker.
    """

    state: BreakerState = BreakerState.CLOSED
    open_until: float = 0.0
    """The end of the current or last opening."""
    openings: int = 0
    """Consecutive openings, each twice as long as the one before."""
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _in_a_row: int = 0
    _failed_at: float = float("-inf")

    def success(self, now: float) -> None:
        """An attempt made progress on the worker. Call it once per attempt."""
        self._outcomes.append(True)
        self._in_a_row = 0
        self._apply(_E.SUCCESS, now)

    def failure(self, now: float) -> None:
        """An attempt failed through the worker's fault."""
        if now - self._failed_at < MOMENT_S:
            return
        self._failed_at = now
        self._outcomes.append(False)
        self._in_a_row += 1
        many = len(self._outcomes) >= FEWEST
        often = many and self._outcomes.count(False) >= MAX_LOST * len(self._outcomes)
        self._apply(_E.FAILURE, now)
        if self._in_a_row >= MAX_IN_A_ROW or often:
            self._apply(_E.TRIPPED, now)

    def placed(self) -> bool:
        """An attempt is placed on the worker. Returns whether it is the probe; if so, call `left`
        when it is over."""
        probes = self.state is _S.HALF_OPEN
        self._apply(_E.PLACED)
        return probes

    def left(self) -> None:
        """The probe is over, whatever its outcome."""
        self._apply(_E.LEFT)

    def refuses(self, now: float) -> bool:
        """Whether the worker gets no new attempt now."""
        if self.state is _S.OPEN and now >= self.open_until:
            self._apply(_E.COOLED, now)
        return self.state in (_S.OPEN, _S.PROBING)

    def _apply(self, event: BreakerEvent, now: float = 0.0) -> None:
        """now: needed by events that may open the breaker."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return
        self.state = state
        if state is _S.OPEN:
            if now - self.open_until > FORGET_S:
                self.openings = 0
            self.open_until = now + min(OPEN_S * 2.0**self.openings, LONGEST_OPEN_S)
            self.openings += 1
            self._in_a_row = 0
            self._outcomes.clear()


class Breakers:
    """The breakers of one pool, by instance id. Bounded: the least recently used ones are
    dropped."""

    def __init__(self) -> None:
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def of(self, instance_id: str) -> Breaker:
        """Returns the worker's breaker, a closed one for a new worker."""
        breaker = self._breakers.setdefault(instance_id, Breaker())
        self._breakers.move_to_end(instance_id)
        while len(self._breakers) > MAX_KNOWN:
            self._breakers.popitem(last=False)
        return breaker

    @property
    def all_closed(self) -> bool:
        return all(breaker.state is _S.CLOSED for breaker in self._breakers.values())

    def ejected(self, live: Collection[str], now: float) -> frozenset[str]:
        """Returns those of the workers that get no new attempts: at most half of them, so that the
        last worker is always used. If more refuse, those that stay open for longest."""
        refusing = [
            (breaker.open_until, instance_id)
            for instance_id in live
            if (breaker := self._breakers.get(instance_id)) is not None and breaker.refuses(now)
        ]
        refusing.sort(reverse=True)
        return frozenset(instance_id for _, instance_id in refusing[: len(live) // 2])


MAX_LONE_DEATHS = 2
"""Deaths of workers with this request as their only suspect, after which the request fails."""


@dataclass(slots=True)
class Suspicion:
    """Whether one request may be what kills workers.

    A request is a suspect when its worker died or hung before the attempt received a token. A
    suspect that receives a token in a later attempt is cleared, whichever requests shared its
    batch.
    """

    suspect: bool = False
    lone_deaths: int = 0
    """Deaths of workers on which it was the only suspect."""

    @property
    def guilty(self) -> bool:
        return self.lone_deaths >= MAX_LONE_DEATHS

    def died(self, *, alone: bool) -> None:
        """A worker died with the request on it, before the request received a token there. alone:
        no other suspect was on the worker."""
        self.suspect = True
        self.lone_deaths += alone

    def cleared(self) -> None:
        """The request received a token."""
        self.suspect = False
        self.lone_deaths = 0


class Quarantine:
    """The workers that run suspects of one router, by instance id. A worker runs at most one
    suspect at a time, so that the next death identifies it."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    def taken(self) -> frozenset[str]:
        """The workers that run a suspect."""
        return frozenset(self._taken)

    @contextmanager
    def entered(self, instance_ids: Collection[str]) -> Iterator[None]:
        """Marks the workers as running a suspect within the context. None of them runs one
        before."""
        assert self._taken.isdisjoint(instance_ids), "two suspects on one worker"
        self._taken.update(instance_ids)
        try:
            yield
        finally:
            self._taken.difference_update(instance_ids)


class RetryBudget:
    """Bounds the retries that a router adds to the load of a failing fleet.

    A token bucket (as in "Handling Overload", Site Reliability Engineering, 2016, and in Finagle):
    every started request adds a share of a retry, time adds a little, so that a quiet router can
    retry too, and every retry takes one. An attempt that resumes output which the client has begun
    to read is no retry and needs no budget.
    """

    def __init__(self, *, share: float, per_s: float, most: float) -> None:
        """share: retries per started request. per_s: additional retries per second. most: the
        largest burst."""
        self._share = share
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = math.inf

    def started(self) -> None:
        """A request starts."""
        self._left = min(self._most, self._left + self._share)

    def take(self, now: float) -> bool:
        """Takes one retry from the budget; returns whether one was available."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(slots=True)
class SteadyVerdict:
    """A verdict that changes only after several consecutive observations against it. It starts as
    good.

    A single observation may be an accident (a pause, a full ring buffer). A verdict that followed
    every observation would shift work back and forth.
    """

    patience: int = 2
    """Consecutive observations that change the verdict, in either direction."""
    good: bool = True
    _against: int = 0

    def observe(self, good: bool) -> bool:
        """Takes one observation; returns whether it changed the verdict."""
        self._against = 0 if good is self.good else self._against + 1
        if self._against < self.patience:
            return False
        self.good, self._against = good, 0
        return True
