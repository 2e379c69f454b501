"""When a worker that loses attempts gets no new ones: a circuit breaker, and those of a whole pool.

Pure: told what became of attempts and what time it is. A worker that died needs no breaker: its
next instance id is another worker.

    CLOSED ──TRIPPED──► OPEN ──COOLED──► HALF_OPEN ──PLACED──► PROBING ──GAINED──► CLOSED
                                             ▲                  │  └────LOST────► OPEN, for longer
                                             └───────LEFT───────┘

A breaker trips when attempts are lost one after the other, or when a worker that is not simply
unlucky loses many of them (outlier ejection). Losses of one moment are one piece of evidence: a
stream that breaks takes all its attempts with it. However many breakers are open, at least half of
a pool is used, and the last worker always.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

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
