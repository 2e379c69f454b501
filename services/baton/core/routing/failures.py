"""What a router learns from failures: breakers, quarantine, retry budgets, steady verdicts."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

# When a worker that loses attempts gets no new ones: a circuit breaker, and those of a whole pool.
#
# Pure: told what became of attempts and what time it is. A worker that died needs no breaker: its
# next instance id is another worker.
#
#     CLOSED ──TRIPPED──► OPEN ──COOLED──► HALF_OPEN ──PLACED──► PROBING ──GAINED──► CLOSED
#                                              ▲                  │  └────LOST────► OPEN, for longer
#                                              └───────LEFT───────┘
#
# A breaker trips when attempts are lost one after the other, or when a worker that is not simply
# unlucky loses many of them (outlier ejection). Losses of one moment are one piece of evidence: a
# stream that breaks takes all its attempts with it. However many breakers are open, at least half
# of a pool is used, and the last worker always.


MAX_IN_A_ROW = 3
WINDOW = 20
"""Outcomes that are remembered of a worker."""
FEWEST = 10
"""Outcomes from which a rate is told."""
MAX_LOST = 0.5
MOMENT_S = 0.1
OPEN_S = 0.5
LONGEST_OPEN_S = 4.0
"""Capacity that is back is used within five seconds; until then it costs an attempt so often."""
FORGET_S = 60.0
MAX_KNOWN = 4096


class BreakerState(Enum):
    """What a worker gets: all, nothing, the next attempt, nothing besides that attempt."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()
    PROBING = auto()


class BreakerEvent(Enum):
    """TRIPPED: too much was lost. COOLED: it was open for long enough. PLACED: an attempt is given
    to the worker. GAINED, LOST: an attempt got somewhere there, or was lost. LEFT: the one that
    was given has left without either.
    """

    TRIPPED = auto()
    COOLED = auto()
    PLACED = auto()
    GAINED = auto()
    LOST = auto()
    LEFT = auto()


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.CLOSED, _E.TRIPPED): _S.OPEN,
    (_S.OPEN, _E.COOLED): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.PLACED): _S.PROBING,
    (_S.PROBING, _E.GAINED): _S.CLOSED,
    (_S.PROBING, _E.LOST): _S.OPEN,
    (_S.PROBING, _E.LEFT): _S.HALF_OPEN,
}
"""Any other event changes nothing: what still ran on a worker whose breaker opened is no probe."""


@dataclass(slots=True)
class Breaker:
    """One worker's. Times in seconds of the caller's monotonic clock.

    open_until: of the present or the last opening. openings: in a row, each twice as long as the
    one before; forgotten when it then stayed closed for FORGET_S.
    """

    state: BreakerState = BreakerState.CLOSED
    open_until: float = 0.0
    openings: int = 0
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _in_a_row: int = 0
    _lost_at: float = float("-inf")

    def gained(self, now: float) -> None:
        """An attempt got somewhere on the worker; told once per attempt."""
        self._outcomes.append(True)
        self._in_a_row = 0
        self._apply(_E.GAINED, now)

    def lost(self, now: float) -> None:
        """The worker is to blame for the loss of an attempt."""
        if now - self._lost_at < MOMENT_S:
            return
        self._lost_at = now
        self._outcomes.append(False)
        self._in_a_row += 1
        many = len(self._outcomes) >= FEWEST
        often = many and self._outcomes.count(False) >= MAX_LOST * len(self._outcomes)
        self._apply(_E.LOST, now)
        if self._in_a_row >= MAX_IN_A_ROW or often:
            self._apply(_E.TRIPPED, now)

    def placed(self) -> bool:
        """An attempt is placed on the worker. Returns whether it is the probe; `left` must follow
        when that one is over."""
        probes = self.state is _S.HALF_OPEN
        self._apply(_E.PLACED)
        return probes

    def left(self) -> None:
        """The probe is over, whatever became of it."""
        self._apply(_E.LEFT)

    def refuses(self, now: float) -> bool:
        """Whether the worker gets no new attempt now."""
        if self.state is _S.OPEN and now >= self.open_until:
            self._apply(_E.COOLED, now)
        return self.state in (_S.OPEN, _S.PROBING)

    def _apply(self, event: BreakerEvent, now: float = 0.0) -> None:
        """now: of events that may open it."""
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
    """Those of one pool, by instance id. Bounded: the ones that were not used for longest go."""

    def __init__(self) -> None:
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def of(self, instance_id: str) -> Breaker:
        """The worker's; a new one is closed."""
        breaker = self._breakers.setdefault(instance_id, Breaker())
        self._breakers.move_to_end(instance_id)
        while len(self._breakers) > MAX_KNOWN:
            self._breakers.popitem(last=False)
        return breaker

    @property
    def all_closed(self) -> bool:
        return all(breaker.state is _S.CLOSED for breaker in self._breakers.values())

    def ejected(self, live: Collection[str], now: float) -> frozenset[str]:
        """Of these workers, those that get no new attempt: at most half of them. Of too many, those
        whose turn is furthest off."""
        refusing = [
            (breaker.open_until, instance_id)
            for instance_id in live
            if (breaker := self._breakers.get(instance_id)) is not None and breaker.refuses(now)
        ]
        refusing.sort(reverse=True)
        return frozenset(instance_id for _, instance_id in refusing[: len(live) // 2])


# Which requests may be what kills workers, and how they are kept apart.
#
# A request that had gained no token in an attempt whose worker died (or hung) is a suspect: it may
# have done it. Suspects run at most one per worker at a time, so that the next death tells who it
# was. Two deaths with a lone suspect end it. One that gains a token in a later attempt is cleared,
# whatever it shared a batch with.


MAX_LONE_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """Of one request. lone_deaths: of workers on which it was the only suspect."""

    suspect: bool = False
    lone_deaths: int = 0

    @property
    def guilty(self) -> bool:
        return self.lone_deaths >= MAX_LONE_DEATHS

    def died(self, *, alone: bool) -> None:
        """A worker died with the request on it, before it had gained a token there. alone: as the
        only suspect."""
        self.suspect = True
        self.lone_deaths += alone

    def cleared(self) -> None:
        """It gained a token."""
        self.suspect = False
        self.lone_deaths = 0


class Quarantine:
    """Where the suspects of one router run, by instance id."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    def taken(self) -> frozenset[str]:
        """Workers that have a suspect."""
        return frozenset(self._taken)

    @contextmanager
    def entered(self, instance_ids: Collection[str]) -> Iterator[None]:
        """A suspect is on these workers while the context is open; none was."""
        assert self._taken.isdisjoint(instance_ids), "two suspects on one worker"
        self._taken.update(instance_ids)
        try:
            yield
        finally:
            self._taken.difference_update(instance_ids)


# How many retries a router may add to the load of a fleet that fails.
#
# A token bucket (as in "Handling Overload", Site Reliability Engineering, 2016, and as Finagle has
# it): every request that starts pays in a share of a retry, time pays in a little, so that a quiet
# router can retry too, and every retry takes one out. What a client has begun to read is no retry:
# it is never asked for here.


class RetryBudget:
    """share: retries per request started. per_s: retries per second besides. most: the largest
    burst. Times in seconds of the caller's monotonic clock.
    """

    def __init__(self, *, share: float, per_s: float, most: float) -> None:
        self._share = share
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = math.inf

    def started(self) -> None:
        """A request begins."""
        self._left = min(self._most, self._left + self._share)

    def take(self, now: float) -> bool:
        """Whether one more retry is allowed; if so, it is taken."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


# A verdict that does not flap: only several observations in a row against it change it.


@dataclass(slots=True)
class SteadyVerdict:
    """Good at first. patience: so many observations in a row change it, in either direction.

    One observation may be an accident (a pause, a full ring); a verdict that follows every one of
    them would send work away and call it back all the time.
    """

    patience: int = 2
    good: bool = True
    _against: int = 0

    def observe(self, good: bool) -> bool:
        """Takes one observation. True when it has changed the verdict."""
        self._against = 0 if good is self.good else self._against + 1
        if self._against < self.patience:
            return False
        self.good, self._against = good, 0
        return True
