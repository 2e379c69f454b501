"""The states of a hand-over as one table, and the counters of its two sides.

A hand-over moves the KV of one input from a sender to a receiver. Each side has states of its own,
which follow the messages of one FIFO stream; the end of the stream is the end of the hand-over:

    sender       OFFERED ── OPENED ── ANNOUNCED ── GIVING ── GIVEN ── COMPLETED
                              │          │  └──── REFUSED (the receiver is full)
    receiver              OPENING ── RESERVING ── TAKING ── COMPLETED
                                         └──── FULL

From every state that is not an end, CANCEL (our own side gives up), PEER_FAILED (the other side
gave up), PEER_LOST (the stream broke or fell silent) and DEADLINE lead to FAILED, so whatever
happens, both sides end. `LIMITS` names for each state whom it waits for and for how long; PROGRESS
is the one event that stays in its state and starts that state's time again. On top of these, the
whole hand-over has a deadline of its own, which the worker that runs it sets.

Safety rests on three rules, and the tests explore every interleaving for them:
- A KV chunk is made only from positions that are finished, not cached by the receiver, and against
  a credit; a credit is given only against finished positions and a landing buffer that is held.
- KV chunks follow each other without gap or overlap, so the counters below are the whole state.
- After its end a side makes no KV chunk and gives no credit.

What moves is an input that one side computes for the other or, where the receiver asks for one, a
prefix from the sender's cache. In OPENED the sender's scheduler then pins what the cache has; only
that is announced, which may be less than what was asked for, and nothing of it is evicted while it
is on offer. Where nothing is left, the sender gives up. Whatever the receiver has unpacked when a
prefix's hand-over ends is of use, because KV chunks come in order.

What a model's layers keep as a state (`KvLayout.state_positions`) travels as so many positions
more, behind those of the input. They are finished with the input's last one, because each step
rewrites them, and no KV chunk has some of both, because they lie apart in a table.

A Collect stream may overtake the offer it asks for. It then waits for `EARLY_STREAM_S`, before
there is a hand-over at all; ids that ended are remembered and refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from batonlm.core.errors import HandoverFailed

EARLY_STREAM_S = 2.0
"""How long a stream waits for the offer that it overtook."""

HANDOVER_ID_BYTES = 16


class SenderState(Enum):
    OFFERED = "offered"
    OPENED = "opened"
    ANNOUNCED = "announced"
    GIVING = "giving"
    GIVEN = "given"
    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"


class ReceiverState(Enum):
    OPENING = "opening"
    RESERVING = "reserving"
    TAKING = "taking"
    COMPLETED = "completed"
    FULL = "full"
    FAILED = "failed"


State = SenderState | ReceiverState


class HandoverEvent(Enum):
    OPEN = "open"
    ANNOUNCE = "announce"
    GRANT = "grant"
    FULL = "full"
    PROGRESS = "progress"
    ALL_GIVEN = "all given"
    COMPLETE = "complete"
    CANCEL = "cancel"
    PEER_FAILED = "peer failed"
    PEER_LOST = "peer lost"
    DEADLINE = "deadline"


_G, _C, _E = SenderState, ReceiverState, HandoverEvent

ENDS: frozenset[State] = frozenset(
    {_G.COMPLETED, _G.REFUSED, _G.FAILED, _C.COMPLETED, _C.FULL, _C.FAILED}
)

TRANSITIONS: Mapping[tuple[State, HandoverEvent], State] = {
    (_G.OFFERED, _E.OPEN): _G.OPENED,
    (_G.OPENED, _E.ANNOUNCE): _G.ANNOUNCED,
    (_G.ANNOUNCED, _E.GRANT): _G.GIVING,
    (_G.ANNOUNCED, _E.FULL): _G.REFUSED,
    (_G.GIVING, _E.PROGRESS): _G.GIVING,
    (_G.GIVING, _E.ALL_GIVEN): _G.GIVEN,
    (_G.GIVEN, _E.COMPLETE): _G.COMPLETED,
    (_C.OPENING, _E.ANNOUNCE): _C.RESERVING,
    (_C.RESERVING, _E.GRANT): _C.TAKING,
    (_C.RESERVING, _E.FULL): _C.FULL,
    (_C.TAKING, _E.PROGRESS): _C.TAKING,
    (_C.TAKING, _E.COMPLETE): _C.COMPLETED,
    **{
        (state, event): type(state)["FAILED"]
        for state in (*SenderState, *ReceiverState)
        if state not in ENDS
        for event in (_E.CANCEL, _E.PEER_FAILED, _E.PEER_LOST, _E.DEADLINE)
    },
}


class StateLimit(NamedTuple):
    """How long a state may last."""

    owner: str
    """Whom it waits for, and what for."""
    seconds: float


LIMITS: Mapping[State, StateLimit] = {
    _G.OFFERED: StateLimit("the receiver, to open its stream", 10.0),
    _G.OPENED: StateLimit("our scheduler, to plan the first chunk or pin a prefix", 600.0),
    _G.ANNOUNCED: StateLimit("the receiver, to reserve blocks", 10.0),
    _G.GIVING: StateLimit("our engine to compute, or the receiver to take", 60.0),
    _G.GIVEN: StateLimit("the receiver, to confirm", 5.0),
    _C.OPENING: StateLimit("the sender, to announce", 600.0),
    _C.RESERVING: StateLimit("our scheduler, to reserve blocks", 10.0),
    _C.TAKING: StateLimit("the sender to compute, or our engine to unpack", 60.0),
}


def follow(state: State, event: HandoverEvent) -> State:
    """The state after an event. Raises HandoverFailed when the event is out of place."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise HandoverFailed(f"'{event.value}' is out of place in '{state.value}'") from None


@dataclass(frozen=True, slots=True)
class KvChunkRange:
    """The positions that one KV chunk carries."""

    index: int
    """The KV chunk's number in the hand-over."""
    first_position: int
    num_positions: int


@dataclass(slots=True)
class SenderSide:
    """The sender's state of one hand-over. A method is called for each thing received or done.

    Faults of the peer raise HandoverFailed and leave the state as it was; the caller then calls
    `end`.
    """

    num_positions: int
    """Of the input."""
    state: State = SenderState.OFFERED
    positions_per_kv_chunk: int = 0
    finished: int = 0
    """Positions below this one are computed, and the receiver was sent so."""
    next_position: int = 0
    """The first one that no KV chunk carries yet."""
    next_index: int = 0
    """Of the next KV chunk."""
    credits: int = 0
    """KV chunks that the receiver has landing buffers for and that were not made yet."""
    outstanding: set[int] = field(default_factory=set)
    """KV chunks that were sent and not confirmed."""
    num_sent: int = 0
    """KV chunks that were sent."""
    sent_tokens: bool = False
    is_prefix: bool = False
    """Whether num_positions are those asked for, until it is announced how many there are."""
    state_positions: int = 0
    """Behind those of the input."""

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    @property
    def end_position(self) -> int:
        """Behind all that is given."""
        return self.num_positions + self.state_positions

    @property
    def wants_tokens(self) -> bool:
        """Every KV chunk was sent: token 0 may follow, which is the sender's last message."""
        return (
            self.state is SenderState.GIVING
            and self.next_position == self.end_position
            and self.num_sent == self.next_index
            and not self.sent_tokens
        )

    def opened(self, positions_per_kv_chunk: int) -> None:
        if positions_per_kv_chunk < 1:
            raise HandoverFailed("the receiver's buffers are smaller than one position")
        self.state = follow(self.state, HandoverEvent.OPEN)
        self.positions_per_kv_chunk = positions_per_kv_chunk

    def announced(self, num_positions: int | None = None) -> None:
        """num_positions: of a prefix, what is pinned of it."""
        state = follow(self.state, HandoverEvent.ANNOUNCE)
        if num_positions is not None:
            if not (self.is_prefix and 0 < num_positions <= self.num_positions):
                raise HandoverFailed("announced what was not asked for")
            self.num_positions = num_positions
        self.state = state

    def granted(self, from_position: int) -> None:
        state = follow(self.state, HandoverEvent.GRANT)
        if not 0 <= from_position <= self.num_positions:
            raise HandoverFailed("granted from a position that the input does not have")
        self.state = state
        self.next_position = self.finished = from_position

    def refused(self) -> None:
        self.state = follow(self.state, HandoverEvent.FULL)

    def advanced(self, finished: int) -> bool:
        """Our engine computed the input up to `finished`. True when the receiver has to be sent
        so."""
        if finished >= self.num_positions:
            finished = self.end_position
        if self.state is not SenderState.GIVING or finished <= self.finished:
            return False
        self.state = follow(self.state, HandoverEvent.PROGRESS)
        self.finished = finished
        return True

    def credited(self, num_kv_chunks: int) -> None:
        """Raises HandoverFailed when more was credited than what is finished can use."""
        self.state = follow(self.state, HandoverEvent.PROGRESS)
        self.credits += num_kv_chunks
        if num_kv_chunks < 1 or self.credits > _chunks_left(self):
            raise HandoverFailed("credited KV chunks that do not exist")

    def next_chunk(self) -> KvChunkRange | None:
        """The next KV chunk that may be made now; it counts as made, and `sent` follows.

        What is finished is cut into as few KV chunks as can be, of equal size: a small last one
        would cost what a large one does, and the first one keeps the receiver waiting for its
        packing. The state is cut apart.
        """
        inputs, states = _left(self)
        left = inputs or states
        if self.state is not SenderState.GIVING or self.credits == 0 or left == 0:
            return None
        num_kv_chunks = -(-left // self.positions_per_kv_chunk)
        count = -(-left // num_kv_chunks)
        chunk = KvChunkRange(self.next_index, self.next_position, count)
        self.credits -= 1
        self.next_index += 1
        self.next_position += count
        return chunk

    def sent(self, index: int) -> None:
        """The KV chunk is sealed in its buffer and is being announced."""
        self.state = follow(self.state, HandoverEvent.PROGRESS)
        self.num_sent += 1
        self.outstanding.add(index)

    def collected(self, index: int) -> None:
        state = follow(self.state, HandoverEvent.PROGRESS)
        if index not in self.outstanding:
            raise HandoverFailed("collected a KV chunk that was not sent")
        self.state = state
        self.outstanding.discard(index)
        self._check_given()

    def tokens(self) -> None:
        """Token 0 is being sent. Raises HandoverFailed unless `wants_tokens`."""
        if not self.wants_tokens:
            raise HandoverFailed("token 0 was told before the last KV chunk, or twice")
        self.sent_tokens = True
        self._check_given()

    def completed(self) -> None:
        self.state = follow(self.state, HandoverEvent.COMPLETE)

    def end(self, event: HandoverEvent) -> None:
        """Ends the hand-over for a reason. Without effect when it has ended already."""
        if not self.ended:
            self.state = follow(self.state, event)

    def _check_given(self) -> None:
        if self.sent_tokens and not self.outstanding:
            self.state = follow(self.state, HandoverEvent.ALL_GIVEN)


@dataclass(slots=True)
class ReceiverSide:
    """The receiver's state of one hand-over. A method is called for each thing received or done."""

    num_positions: int
    """Of the input."""
    positions_per_kv_chunk: int
    state: State = ReceiverState.OPENING
    finished: int = 0
    """Positions below this one are computed, as far as the sender has sent."""
    next_position: int = 0
    """The first one that no KV chunk carried yet."""
    next_index: int = 0
    """Of the next KV chunk."""
    credits: int = 0
    """Credits that were given and not used."""
    landing: set[int] = field(default_factory=set)
    """KV chunks on their way into our blocks."""
    has_tokens: bool = False
    is_prefix: bool = False
    """Whether num_positions are those asked for, until the sender announces how many it has."""
    state_positions: int = 0
    """Behind those of the input."""

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    @property
    def end_position(self) -> int:
        """Behind all that is collected."""
        return self.num_positions + self.state_positions

    @property
    def wants_credit(self) -> bool:
        """Whether a landing buffer is of use now: finished positions wait without a credit."""
        return self.state is ReceiverState.TAKING and self.credits < _chunks_left(self)

    @property
    def all_in(self) -> bool:
        return (
            self.state is ReceiverState.TAKING
            and self.has_tokens
            and self.next_position == self.end_position
            and not self.landing
        )

    def announced(self, num_positions: int) -> None:
        state = follow(self.state, HandoverEvent.ANNOUNCE)
        shorter = self.is_prefix and 0 < num_positions < self.num_positions
        if num_positions != self.num_positions and not shorter:
            raise HandoverFailed("the sender announced another input")
        self.num_positions = num_positions
        self.state = state

    def granted(self, from_position: int) -> None:
        self.state = follow(self.state, HandoverEvent.GRANT)
        self.next_position = self.finished = from_position

    def full(self) -> None:
        self.state = follow(self.state, HandoverEvent.FULL)

    def advanced(self, finished: int) -> None:
        state = follow(self.state, HandoverEvent.PROGRESS)
        if not self.finished < finished <= self.end_position:
            raise HandoverFailed("the sender finished positions out of order")
        self.state, self.finished = state, finished

    def credited(self) -> None:
        """One landing buffer is held for a KV chunk to come."""
        self.state = follow(self.state, HandoverEvent.PROGRESS)
        self.credits += 1

    def arriving(self, chunk: KvChunkRange) -> None:
        """A KV chunk is ready at the sender; it uses one credit."""
        state = follow(self.state, HandoverEvent.PROGRESS)
        if self.credits == 0:
            raise HandoverFailed("a KV chunk came without a credit")
        if (chunk.index, chunk.first_position) != (self.next_index, self.next_position):
            raise HandoverFailed("a KV chunk came out of order")
        inputs, states = _left(self)
        if not 0 < chunk.num_positions <= min(self.positions_per_kv_chunk, inputs or states):
            raise HandoverFailed("a KV chunk carries positions that are not finished")
        self.state = state
        self.credits -= 1
        self.next_index += 1
        self.next_position += chunk.num_positions
        self.landing.add(chunk.index)

    def landed(self, index: int) -> None:
        """The KV chunk was verified and its KV lies in our blocks."""
        self.state = follow(self.state, HandoverEvent.PROGRESS)
        self.landing.remove(index)

    def tokens(self) -> None:
        state = follow(self.state, HandoverEvent.PROGRESS)
        if self.has_tokens or self.next_position != self.end_position:
            raise HandoverFailed("token 0 came before the last KV chunk, or twice")
        self.state, self.has_tokens = state, True

    def completed(self) -> None:
        self.state = follow(self.state, HandoverEvent.COMPLETE)

    def end(self, event: HandoverEvent) -> None:
        """Ends the hand-over for a reason. Without effect when it has ended already."""
        if not self.ended:
            self.state = follow(self.state, event)


def _left(side: SenderSide | ReceiverSide) -> tuple[int, int]:
    """How many finished positions of the input, and of the state behind it, no KV chunk carries."""
    inputs = max(0, min(side.finished, side.num_positions) - side.next_position)
    return inputs, side.finished - side.next_position - inputs


def _chunks_left(side: SenderSide | ReceiverSide) -> int:
    """How many KV chunks these are."""
    return sum(-(-left // side.positions_per_kv_chunk) for left in _left(side))


# The life of a staging buffer as one table.
#
# A buffer has up to two owners: its holder, who took it, and a transfer that may still write to it.
#
#     FREE ── TAKE ──► HELD ── LEND ──► LENT ── RELEASE ──► ORPHANED
#       ▲               │ ▲               │                   │
#       └── RELEASE ────┘ └─── SETTLE ────┘                   │
#       └──────────────────── SETTLE ─────────────────────────┘
#
# LENT: a transfer was posted and is undecided. ORPHANED: the holder has left before it was decided.
# Nothing can stop such a transfer, so only its end, well or badly, makes the buffer free.


class BufferState(Enum):
    """The life of a staging buffer. See `BUFFER_TRANSITIONS`."""

    FREE = "free"
    HELD = "held"
    LENT = "lent"
    ORPHANED = "orphaned"


class BufferEvent(Enum):
    TAKE = "taken"
    LEND = "lent"
    SETTLE = "settled"
    RELEASE = "released"


BUFFER_TRANSITIONS: Mapping[tuple[BufferState, BufferEvent], BufferState] = {
    (BufferState.FREE, BufferEvent.TAKE): BufferState.HELD,
    (BufferState.HELD, BufferEvent.LEND): BufferState.LENT,
    (BufferState.HELD, BufferEvent.RELEASE): BufferState.FREE,
    (BufferState.LENT, BufferEvent.SETTLE): BufferState.HELD,
    (BufferState.LENT, BufferEvent.RELEASE): BufferState.ORPHANED,
    (BufferState.ORPHANED, BufferEvent.SETTLE): BufferState.FREE,
}


def follow_buffer(state: BufferState, event: BufferEvent) -> BufferState:
    """The state after an event. Raises RuntimeError for what no correct owner does."""
    try:
        return BUFFER_TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a buffer that is {state.value} cannot be {event.value}") from None
