"""The life of a staging buffer as one table.

A buffer has up to two owners: its holder, who took it, and a transfer that may still write into it.

    FREE ── TAKE ──► HELD ── LEND ──► LENT ── RELEASE ──► ORPHANED
      ▲               │ ▲               │                   │
      └── RELEASE ────┘ └─── SETTLE ────┘                   │
      └──────────────────── SETTLE ─────────────────────────┘

LENT: a transfer was posted and is undecided. ORPHANED: the holder has left before it was decided.
Nothing can stop such a transfer, so only its end, well or badly, makes the buffer free.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class BufferState(Enum):
    FREE = "free"
    HELD = "held"
    LENT = "lent"
    ORPHANED = "orphaned"


class BufferEvent(Enum):
    TAKE = "taken"
    LEND = "lent"
    SETTLE = "settled"
    RELEASE = "released"


_S, _E = BufferState, BufferEvent

TRANSITIONS: Mapping[tuple[BufferState, BufferEvent], BufferState] = {
    (_S.FREE, _E.TAKE): _S.HELD,
    (_S.HELD, _E.LEND): _S.LENT,
    (_S.HELD, _E.RELEASE): _S.FREE,
    (_S.LENT, _E.SETTLE): _S.HELD,
    (_S.LENT, _E.RELEASE): _S.ORPHANED,
    (_S.ORPHANED, _E.SETTLE): _S.FREE,
}


def follow(state: BufferState, event: BufferEvent) -> BufferState:
    """The state after an event. Raises RuntimeError for what no correct owner does."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a buffer that is {state.value} cannot be {event.value}") from None
