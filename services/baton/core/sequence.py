"""Sequence, the progress of one choice on one worker; knows no scheduler.

A sequence's KV comes to be in one of two ways: computed here, or collected from another worker.
Then it either runs here, or is held for the worker that will run it:

              ┌── START ──► PREFILLING ──┬─ READY ─► RUNNING ◄── RESUME ── PAUSED
    QUEUED ───┤                 │        │              └────── PAUSE ───────►
      ▲       └─ RESERVE ─► ARRIVING ────┘ READY
      └─── PREEMPT, from PREFILLING, RUNNING and PAUSED
                                PREFILLING ── HOLD ──► HELD

PAUSED is a sequence as far ahead of confirmed text as it may get. FINISH, CANCEL and FAIL end a
sequence, from where the table says so; what is not in the table is a fault of Baton and raises
Internal. Until they have KV, sequences with the same input move together (`SharedInput`).
"""

from __future__ import annotations

import collections.abc
from enum import Enum, auto

from baton.core.attempt import Attempt, ChoiceTokens, Logprobs, SequenceKey
from baton.core.block_pool import BlockPool
from baton.core.blocks import BlockTable
from baton.core.errors import Internal
from baton.core.plan import SampleRow
from baton.core.prefix import PrefixChain
from baton.core.stops import StopRule


class SequenceState(Enum):
    QUEUED = auto()
    PREFILLING = auto()
    ARRIVING = auto()
    RUNNING = auto()
    PAUSED = auto()
    HELD = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


class SequenceEvent(Enum):
    START = auto()
    RESERVE = auto()
    READY = auto()
    HOLD = auto()
    PAUSE = auto()
    RESUME = auto()
    PREEMPT = auto()
    FINISH = auto()
    CANCEL = auto()
    FAIL = auto()


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (_S.QUEUED, _E.START): _S.PREFILLING,
    (_S.QUEUED, _E.RESERVE): _S.ARRIVING,
    (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
    (_S.QUEUED, _E.FAIL): _S.FAILED,
    (_S.PREFILLING, _E.READY): _S.RUNNING,
    (_S.PREFILLING, _E.HOLD): _S.HELD,
    (_S.PREFILLING, _E.PREEMPT): _S.QUEUED,
    (_S.PREFILLING, _E.FINISH): _S.FINISHED,
    (_S.PREFILLING, _E.CANCEL): _S.CANCELLED,
    (_S.PREFILLING, _E.FAIL): _S.FAILED,
    (_S.ARRIVING, _E.READY): _S.RUNNING,
    (_S.ARRIVING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.PAUSE): _S.PAUSED,
    (_S.RUNNING, _E.PREEMPT): _S.QUEUED,
    (_S.RUNNING, _E.FINISH): _S.FINISHED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.PAUSED, _E.RESUME): _S.RUNNING,
    (_S.PAUSED, _E.PREEMPT): _S.QUEUED,
    (_S.PAUSED, _E.CANCEL): _S.CANCELLED,
    (_S.HELD, _E.FINISH): _S.FINISHED,
    (_S.HELD, _E.CANCEL): _S.CANCELLED,
}

TERMINAL = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})


class Sequence:
    """One choice's tokens and how far its KV has come.

    id: local to the worker, names the sequence to the runner; later sequences have higher ones.
    computed: positions that have KV in `table`. in_flight: a step that samples for it is launched.
    confirmed: first output position not confirmed yet; at most max_unconfirmed positions are
    sampled from there on (0: no limit).
    """

    __slots__ = (
        "_owns_tokens",
        "attempt",
        "chain",
        "computed",
        "confirmed",
        "id",
        "in_flight",
        "key",
        "logprobs",
        "max_unconfirmed",
        "rule",
        "state",
        "table",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: int,
        attempt: Attempt,
        choice: int,
        rule: StopRule,
        max_unconfirmed: int = 0,
    ):
        self.id = sequence_id
        self.attempt = attempt
        self.key = SequenceKey(attempt.request_id, choice, attempt.attempt)
        self.rule = rule
        self.max_unconfirmed = max_unconfirmed
        self.confirmed = attempt.position
        self.state = SequenceState.QUEUED
        self.tokens: collections.abc.Sequence[int] = attempt.token_ids
        self.logprobs: list[Logprobs] = []
        self.table: BlockTable | None = None
        self.chain: PrefixChain | None = None
        self.computed = 0
        self.in_flight = False
        self._owns_tokens = False

    @property
    def priority(self) -> int:
        return self.attempt.priority

    @property
    def position(self) -> int:
        """Output position of the next token."""
        return len(self.tokens) - self.attempt.num_prompt_tokens

    @property
    def must_wait(self) -> bool:
        """Whether it is as far ahead of confirmed positions as it may be."""
        return 0 < self.max_unconfirmed <= self.position - self.confirmed

    def move(self, event: SequenceEvent) -> None:
        """Takes one step through TRANSITIONS. Raises Internal for one that is not there."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise Internal(f"a sequence that is {self.state.name} cannot {event.name}")
        self.state = target

    def sample_row(self) -> SampleRow:
        """Asks for the next token. The row's history is only valid until the step is applied."""
        attempt = self.attempt
        position = len(self.tokens) - attempt.num_prompt_tokens
        history = self.tokens if attempt.sampling.needs_history else ()
        return SampleRow(
            self.id,
            self.key.choice,
            position,
            attempt.sampling,
            self.rule.banned(position),
            history,
            attempt.num_prompt_tokens,
        )

    def accept(self, token_id: int, logprobs: Logprobs | None) -> ChoiceTokens:
        """Appends the token of the next position and decides whether it ends the choice."""
        tokens = self.tokens
        if not self._owns_tokens:
            tokens = self.tokens = list(tokens)
            self._owns_tokens = True
        assert isinstance(tokens, list)
        position = len(tokens) - self.attempt.num_prompt_tokens
        tokens.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return ChoiceTokens(
            self.key,
            position,
            (token_id,),
            () if logprobs is None else (logprobs,),
            *self.rule.ends(position, token_id),
        )

    def give_up_table(self, pool: BlockPool) -> None:
        """Releases its blocks, if it owns any."""
        table, self.table = self.table, None
        if table is not None:
            pool.release(table)

    def tokens_from(self, position: int) -> ChoiceTokens | None:
        """What was sampled here from an output position on; None if that is out of range."""
        first = self.attempt.position
        if not first <= position <= self.position:
            return None
        return ChoiceTokens(
            self.key,
            position,
            tuple(self.tokens[self.attempt.num_prompt_tokens + position :]),
            tuple(self.logprobs[position - first :]),
        )
