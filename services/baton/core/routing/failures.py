"""What a router does about failures: breakers, quarantine, a retry budget, a steady verdict.

In: what became of attempts, and readings of the caller's monotonic clock, in seconds.
Out: which workers get no new attempts, which requests run apart, whether a retry is allowed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_IN_A_ROW = 3
"""Failures one after the other that trip a breaker."""
WINDOW = 20
"""Outcomes that are remembered of a worker."""
FEWEST = 10
"""Outcomes from which on a share of failures is computed."""
MAX_LOST = 0.5
"""Share of failures that trips a breaker."""
MOMENT_S = 0.1
"""Failures within so long are one piece of evidence."""
OPEN_S = 0.5
"""The first time that a breaker stays open."""
LONGEST_OPEN_S = 4.0
"""Capacity that is back is used within five seconds; until then it costs an attempt so often."""
FORGET_S = 60.0
"""A breaker that stays closed for so long starts with OPEN_S again."""
MAX_KNOWN = 4096
"""Instance ids whose breakers are kept."""


class BreakerState(Enum):
    """What a worker gets."""

    CLOSED = auto()
    """Every attempt that is placed on it."""
    OPEN = auto()
    """Nothing."""
    HALF_OPEN = auto()
    """The next attempt."""
    PROBING = auto()
    """Nothing besides the one attempt that it has."""


class BreakerEvent(Enum):
    """What happens to a breaker."""

    TRIPPED = auto()
    """Too many attempts were lost."""
    COOLED = auto()
    """It was open for long enough."""
    PLACED = auto()
    """An attempt is given to the worker."""
    SUCCESS = auto()
    """An attempt gained a token or an answer there."""
    FAILURE = auto()
    """An attempt was lost there."""
    LEFT = auto()
    """The probe has left with neither."""


_S, _E = BreakerState, BreakerEvent

TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.CLOSED, _E.TRIPPED): _S.OPEN,
    (_S.OPEN, _E.COOLED): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.PLACED): _S.PROBING,
    (_S.PROBING, _E.SUCCESS): _S.CLOSED,
    (_S.PROBING, _E.FAILURE): _S.OPEN,
    (_S.PROBING, _E.LEFT): _S.HALF_OPEN,
}
"""Any other event changes nothing: what still ran on a worker whose breaker opened is no probe."""


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: a worker that loses attempts gets no new ones for a while.

        CLOSED ──TRIPPED──► OPEN ──COOLED──► HALF_OPEN ──PLACED──► PROBING ──SUCCESS──► CLOSED
                                                 ▲                  │  └──FAILURE──► OPEN, longer
                                                 └───────LEFT───────┘

    It trips when attempts are lost one after the other, or when half of the last ones were lost
    (outlier ejection). Failures of one moment count once: a stream that breaks takes all its
    attempts with it. A worker that died needs no breaker: its next instance id is another worker.
    """

    state: BreakerState = BreakerState.CLOSED
    open_until: float = 0.0
    """End of the present or the last opening."""
    openings: int = 0
    """In a row, each twice as long as the one before."""
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _in_a_row: int = 0
    _failed_at: float = float("-inf")

    def success(self, now: float) -> None:
        """An attempt gained something on the worker. Call it once per attempt."""
        self._outcomes.append(True)
        self._in_a_row = 0
        self._apply(_E.SUCCESS, now)

    def failure(self, now: float) -> None:
        """The worker is to blame for the loss of an attempt."""
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
        """An attempt is placed on the worker. Returns whether it is the probe; call `left` when
        the probe is over."""
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
        """now: needed by events that may open it."""
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
    """Those of one pool, by instance id. Bounded: the ones that were unused for longest go."""

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
        """Of these workers, those that get no new attempt: at most half of them, so the last
        worker is always used. Of too many, those that stay open for longest."""
        refusing = [
            (breaker.open_until, instance_id)
            for instance_id in live
            if (breaker := self._breakers.get(instance_id)) is not None and breaker.refuses(now)
        ]
        refusing.sort(reverse=True)
        return frozenset(instance_id for _, instance_id in refusing[: len(live) // 2])


MAX_LONE_DEATHS = 2
"""Deaths of workers with a lone suspect after which its request ends."""


@dataclass(slots=True)
class Suspicion:
    """Whether one request may be what kills workers.

    A request that had gained no token in an attempt whose worker died (or hung) is a suspect. A
    suspect that gains a token in a later attempt is cleared, whatever it shared a batch with.
    """

    suspect: bool = False
    lone_deaths: int = 0
    """Deaths of workers on which it was the only suspect."""

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
    """Where the suspects of one router run, by instance id: at most one per worker at a time, so
    that the next death shows which one it was."""

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


class RetryBudget:
    """How many retries a router may add to the load of a fleet that fails.

    A token bucket (as in "Handling Overload", Site Reliability Engineering, 2016, and as Finagle
    has it): every request that starts pays in a share of a retry, time pays in a little, so that a
    quiet router can retry too, and every retry takes one out. An attempt that goes on with output
    which a client has begun to read is no retry: it needs no budget.
    """

    def __init__(self, *, share: float, per_s: float, most: float) -> None:
        """share: retries per request started. per_s: retries per second besides. most: the largest
        burst."""
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


@dataclass(slots=True)
class SteadyVerdict:
    """A verdict that only several observations in a row against it change. It is good at first.

    One observation may be an accident (a pause, a full ring); a verdict that follows every one
    would send work away and call it back all the time.
    """

    patience: int = 2
    """Observations in a row that change it, in either direction."""
    good: bool = True
    _against: int = 0

    def observe(self, good: bool) -> bool:
        """Takes one observation. True when it has changed the verdict."""
        self._against = 0 if good is self.good else self._against + 1
        if self._against < self.patience:
            return False
        self.good, self._against = good, 0
        return True
