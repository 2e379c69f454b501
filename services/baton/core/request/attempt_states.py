"""Where an attempt stands, and what may happen to it: one table. Knows no tokens and no choices.

An attempt has one or two phases:

    PLACING ──► PREFILLING                      every choice ends at token 0: no decode worker
        │
        ├─────► PAIRED ──► HANDING_OVER ──► DECODING     prefill answers first (the usual order)
        │          └──────────────────────────▲         or decode has all KV first
        ├─────────────────────────────────────┘         decode prefills by itself
        └─────► MOVING ──► DECODING                     a decode worker gives it to another one

Any of them ends as ENDED (no choice is left to run in it) or FAILED (its unfinished choices wait
for another attempt). Prefill lost after decode has all KV is no loss; prefill lost while its KV is
being collected is decode's to report.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """A part of an attempt that runs on one worker."""

    PREFILL = auto()
    DECODE = auto()


class AttemptState(Enum):
    """Where an attempt stands."""

    PLACING = auto()
    PREFILLING = auto()
    PAIRED = auto()
    HANDING_OVER = auto()
    MOVING = auto()
    DECODING = auto()
    ENDED = auto()
    FAILED = auto()


class AttemptEvent(Enum):
    """What may happen to an attempt."""

    PLACED_ON_PREFILL = auto()
    PLACED_ON_BOTH = auto()
    PLACED_ON_DECODE = auto()
    PLACED_TO_MOVE = auto()
    PREFILL_ANSWERED = auto()
    PREFILL_LOST = auto()
    KV_COMPLETE = auto()
    DECODE_LOST = auto()
    NOTHING_LEFT = auto()


_S, _E = AttemptState, AttemptEvent

TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (_S.PLACING, _E.PLACED_ON_PREFILL): _S.PREFILLING,
    (_S.PLACING, _E.PLACED_ON_BOTH): _S.PAIRED,
    (_S.PLACING, _E.PLACED_ON_DECODE): _S.DECODING,
    (_S.PLACING, _E.PLACED_TO_MOVE): _S.MOVING,
    (_S.PLACING, _E.NOTHING_LEFT): _S.ENDED,
    # An answer that leaves a choice unfinished breaks the deal: nobody has its KV.
    (_S.PREFILLING, _E.PREFILL_ANSWERED): _S.FAILED,
    (_S.PREFILLING, _E.PREFILL_LOST): _S.FAILED,
    (_S.PREFILLING, _E.NOTHING_LEFT): _S.ENDED,
    (_S.PAIRED, _E.PREFILL_ANSWERED): _S.HANDING_OVER,
    (_S.PAIRED, _E.PREFILL_LOST): _S.FAILED,
    (_S.PAIRED, _E.KV_COMPLETE): _S.DECODING,
    (_S.PAIRED, _E.DECODE_LOST): _S.FAILED,
    (_S.PAIRED, _E.NOTHING_LEFT): _S.ENDED,
    (_S.HANDING_OVER, _E.KV_COMPLETE): _S.DECODING,
    (_S.HANDING_OVER, _E.DECODE_LOST): _S.FAILED,
    (_S.HANDING_OVER, _E.NOTHING_LEFT): _S.ENDED,
    (_S.MOVING, _E.KV_COMPLETE): _S.DECODING,
    (_S.MOVING, _E.DECODE_LOST): _S.FAILED,
    (_S.MOVING, _E.NOTHING_LEFT): _S.ENDED,
    (_S.DECODING, _E.PREFILL_ANSWERED): _S.DECODING,
    (_S.DECODING, _E.PREFILL_LOST): _S.DECODING,
    (_S.DECODING, _E.KV_COMPLETE): _S.DECODING,
    (_S.DECODING, _E.DECODE_LOST): _S.FAILED,
    (_S.DECODING, _E.NOTHING_LEFT): _S.ENDED,
}

OVER = frozenset({_S.ENDED, _S.FAILED})

HOLDERS: dict[AttemptState, frozenset[Phase]] = {
    _S.PLACING: frozenset(),
    _S.PREFILLING: frozenset({Phase.PREFILL}),
    _S.PAIRED: frozenset({Phase.PREFILL, Phase.DECODE}),
    _S.HANDING_OVER: frozenset({Phase.PREFILL, Phase.DECODE}),
    _S.MOVING: frozenset({Phase.DECODE}),
    _S.DECODING: frozenset({Phase.DECODE}),
}
"""Who may hold blocks for an attempt in each state, and has to be told when it is over."""

LOST = {Phase.PREFILL: _E.PREFILL_LOST, Phase.DECODE: _E.DECODE_LOST}
