"""Sequences: the progress of choices on one worker, alone and in groups that share one input.

A sequence's KV is computed here, or collected from another worker. Then the sequence either runs
here, or its KV is held for the worker that goes on with it, also after it has run here:

              ┌── START ──► PREFILLING ──┬─ READY ──► RUNNING ── SWAP ──► SWAPPED
    QUEUED ───┤                 │        │             ▲ │ ▲                │ │
      ▲       └─ RESERVE ─► ARRIVING ────┘ READY ──────┘ │ └─── RESTORE ────┘ │
      └─── PREEMPT ─────────────┴────────────────────────┴────────────────────┘
                     PREFILLING, RUNNING ── HOLD ──► HELD ── RESUME ──► RUNNING

READY is when the step that completes its KV is launched, or its last KV has been collected. RESUME
is for a sequence that has run here and whose KV no other worker got. A sequence without blocks of
the pool is QUEUED, when its KV has to be computed again, or SWAPPED, when swap memory keeps it.
What steps launched before still sample for it counts all the same.
FINISH, CANCEL and FAIL end a sequence, from where the table says so; what is not in the table is a
fault of Baton and raises Internal.
"""

from __future__ import annotations

import collections.abc
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from enum import Enum, auto

from batonlm.core.errors import BatonError, ContextLengthExceeded, Internal, InvalidArgument
from batonlm.core.kvcache.block_pool import (
    BlockPool,
    BlockTable,
    Extents,
    StateSnapshot,
    SwapGrant,
)
from batonlm.core.kvcache.prefix import PrefixChain
from batonlm.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.prompt_logprobs import (
    MAX_BYTES,
    SCORED_POSITIONS,
    Gathered,
    PromptLogprobs,
    entries_bytes,
)
from batonlm.core.request.request import FinishReason
from batonlm.core.scheduler.plan import (
    PENDING,
    Chunk,
    Matcher,
    SampledToken,
    SampleRow,
    Scored,
    StepResult,
)


class StopRule:
    """Decides, where a token is sampled, whether it ends its choice. One for each attempt.

    The model's own end tokens end an answer that follows a grammar even when they are to be
    ignored: then they are drawn only when nothing else can be (see `Sequence.sample_row`).
    """

    __slots__ = ("_banned", "_ignored", "_max_tokens", "end_ids", "max_positions", "min_tokens")

    def __init__(self, attempt: Attempt, eos_token_ids: tuple[int, ...], max_model_len: int):
        stop = attempt.stop
        ignored = eos_token_ids if stop.ignore_eos else ()
        bound = attempt.grammar is not None
        own = eos_token_ids if bound or not stop.ignore_eos else ()
        ends = dict.fromkeys((*own, *stop.stop_token_ids))
        self._banned = tuple(ends)
        self._ignored = tuple(t for t in ignored if bound and t not in stop.stop_token_ids)
        self.end_ids = frozenset(ends)
        """Tokens that end a choice; before output position min_tokens they must not be drawn."""
        self.min_tokens = stop.min_tokens
        self._max_tokens = min(stop.max_tokens, max_model_len - attempt.num_prompt_tokens)
        self.max_positions = attempt.num_prompt_tokens + self._max_tokens
        """Most positions that a choice may have, prompt included."""

    def banned(self, position: int) -> tuple[int, ...]:
        """Tokens that must not be drawn at an output position: too early for an end."""
        return self._banned if position < self.min_tokens else self._ignored

    def ends(self, position: int, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Why the token drawn at an output position ends its choice, and itself if it is an end
        token; (None, None) when the choice goes on."""
        if token_id in self.end_ids:
            return FinishReason.STOP, token_id
        if position + 1 >= self._max_tokens:
            return FinishReason.LENGTH, None
        return None, None


class SequenceState(Enum):
    QUEUED = auto()
    PREFILLING = auto()
    ARRIVING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    HELD = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


class SequenceEvent(Enum):
    START = auto()
    RESERVE = auto()
    READY = auto()
    HOLD = auto()
    RESUME = auto()
    PREEMPT = auto()
    SWAP = auto()
    RESTORE = auto()
    FINISH = auto()
    CANCEL = auto()
    FAIL = auto()


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (_S.QUEUED, _E.START): _S.PREFILLING,
    (_S.QUEUED, _E.RESERVE): _S.ARRIVING,
    (_S.QUEUED, _E.FINISH): _S.FINISHED,
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
    (_S.RUNNING, _E.PREEMPT): _S.QUEUED,
    (_S.RUNNING, _E.SWAP): _S.SWAPPED,
    (_S.RUNNING, _E.HOLD): _S.HELD,
    (_S.RUNNING, _E.FINISH): _S.FINISHED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.SWAPPED, _E.RESTORE): _S.RUNNING,
    (_S.SWAPPED, _E.PREEMPT): _S.QUEUED,
    (_S.SWAPPED, _E.FINISH): _S.FINISHED,
    (_S.SWAPPED, _E.CANCEL): _S.CANCELLED,
    (_S.SWAPPED, _E.FAIL): _S.FAILED,
    (_S.HELD, _E.RESUME): _S.RUNNING,
    (_S.HELD, _E.FINISH): _S.FINISHED,
    (_S.HELD, _E.CANCEL): _S.CANCELLED,
    (_S.HELD, _E.FAIL): _S.FAILED,
}

TERMINAL = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})

_PENDING_ID = (PENDING,)

_made = tuple.__new__
"""A NamedTuple from its fields, half as costly as by its own constructor."""


LEAST = sys.maxsize
"""The priority of a sequence whose router is gone: any other one is more important."""


class Sequence:
    """One choice's tokens and how far its KV has come."""

    __slots__ = (
        "_extents",
        "_last",
        "_matcher",
        "_num_prompt",
        "_orphan_ceiling",
        "_own",
        "_plain_from",
        "_sampling",
        "adapter",
        "attempt",
        "ceiling",
        "chain",
        "confirmed",
        "copied_in",
        "drafts",
        "id",
        "in_flight",
        "key",
        "limit",
        "logprobs",
        "lost",
        "max_unconfirmed",
        "num_computed_tokens",
        "room",
        "rule",
        "serial",
        "snapshot",
        "speculates",
        "state",
        "stay",
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
        matcher: Matcher | None = None,
    ):
        self.id = sequence_id
        """Local to the worker, names the sequence to the runner; later ones have higher ids."""
        self.attempt = attempt
        self.adapter = attempt.adapter
        self.key = SequenceKey(attempt.request_id, choice, attempt.attempt)
        self.rule = rule
        self.max_unconfirmed = max_unconfirmed
        """At most so many positions are sampled from `confirmed` on; 0: no limit."""
        self.confirmed = attempt.position
        """First output position that may still be cut off by a stop string."""
        self.serial = attempt.sampling.needs_history or matcher is not None
        """Whether a row of it needs the values of all tokens before."""
        self.state = SequenceState.QUEUED
        self.tokens: collections.abc.Sequence[int] = attempt.token_ids
        self.logprobs: list[Logprobs] = []
        self.table: BlockTable | None = None
        self.chain: PrefixChain | None = None
        self.stay = 0
        """How often it got blocks."""
        self.in_flight = 0
        """Launched steps that sample for it."""
        self.lost = False
        """Whether what those steps sample is worth nothing."""
        self.drafts: Tokens[int] = ()
        """Those behind its last token in the one launched step that samples for it."""
        self.speculates = not attempt.no_speculation
        """Whether drafts of its tokens may be computed."""
        self.num_computed_tokens = 0
        """Positions that have KV once all launched steps are done: the next position to compute. Of
        drafts in flight all count."""
        self.copied_in = 0
        """The step that copies into its table what a fork has of its own, if it samples nothing for
        it."""
        self.snapshot: StateSnapshot | None = None
        """The newest one of its state that was made while it ran; it may be evicted."""
        self.room = 0
        """First position that needs another block."""
        self.limit = 0
        """The lesser of `room` and `ceiling`."""
        self._matcher = matcher
        """Its way through its grammar, or None."""
        self._sampling = attempt.sampling
        self._num_prompt = attempt.num_prompt_tokens
        self._own: list[int] = []
        # From this position on nothing in a row depends on earlier tokens.
        self._plain_from = sys.maxsize if self.serial else self._num_prompt + rule.min_tokens
        self._last: tuple[int, ...] = ()
        self._extents: Extents = ()
        self._orphan_ceiling: int | None = None
        self._limit()

    @property
    def priority(self) -> int:
        return LEAST if self.orphaned else self.attempt.priority

    @property
    def orphaned(self) -> bool:
        """Whether its router is gone, and it waits for another one."""
        return self._orphan_ceiling is not None

    @property
    def most_positions(self) -> int:
        """Positions that it needs blocks for at most, as things are."""
        return max(self.num_computed_tokens, self.ceiling)

    @property
    def position(self) -> int:
        """Output position of the next token."""
        return len(self.tokens) - self._num_prompt

    @property
    def extents(self) -> Extents:
        """Its blocks, as of the last `settle`."""
        return self._extents

    @property
    def must_wait(self) -> bool:
        """Whether it is as far ahead of confirmed positions as it may be."""
        return 0 < self.max_unconfirmed <= self.position + self.in_flight - self.confirmed

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    def can_be_held(self, newest_applied: int) -> bool:
        """Whether its blocks hold, once steps that sample for it are done, all that another worker
        needs. newest_applied: the step up to which all are done."""
        if self.state is not SequenceState.RUNNING or self.table is None:
            return False
        # A fork that has not run here yet may not have its own blocks' content.
        return not self.table.copies and self.copied_in <= newest_applied

    def move(self, event: SequenceEvent) -> None:
        """Takes one step through TRANSITIONS. Raises Internal for one that is not there."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise Internal(f"a sequence that is {self.state.name} cannot {event.name}")
        self.state = target

    def rename(self, attempt: Attempt, earlier: collections.abc.Sequence[Logprobs] = ()) -> None:
        """It runs on as another attempt of the same choice, whose input is a part of its tokens.
        earlier: the log-probabilities of the output tokens that it began with, if that attempt has
        none of them."""
        del self.logprobs[: max(0, attempt.position - self.attempt.position)]
        self.logprobs[:0] = earlier
        self._orphan_ceiling = None
        self.attempt = attempt
        self.key = SequenceKey(attempt.request_id, self.key.choice, attempt.attempt)
        # As at the start of any attempt: what confirms its input may have gone to the former one.
        self.confirm(attempt.position)

    def orphan(self, most_tokens: int) -> None:
        """Its router is gone. It gets so many more tokens at most until it is renamed."""
        self._orphan_ceiling = self.num_computed_tokens + most_tokens
        self._limit()

    def confirm(self, position: int) -> None:
        """Output positions below this one hold no stop string."""
        self.confirmed = max(self.confirmed, min(position, self.position))
        self._limit()

    def begin(self, pool: BlockPool, computed: int, *, awaited: bool = False) -> None:
        """It has blocks and runs. awaited: a launched step samples its next token."""
        self.num_computed_tokens = computed
        self.stay += 1
        self.in_flight = int(awaited)
        self.drafts = ()
        self.lost = False
        self.settle(pool)

    def settle(self, pool: BlockPool) -> None:
        """Call it when its table has changed."""
        assert self.table is not None
        self.room = pool.room(self.table)
        self.limit = min(self.room, self.ceiling)
        self._extents = self.table.extents

    def sample_row(self) -> SampleRow:
        """The row of the token behind the launched ones. Its history is only valid until the step
        is applied."""
        allowed = b""
        if self._matcher is not None:
            allowed = self._matcher.allowed(self.tokens, self._num_prompt)
        history = self.tokens if self._sampling.needs_history else ()
        return self._row(self.position + self.in_flight, allowed, history)

    def chunk_with(self, drafts: Tokens[int]) -> Chunk:
        """Its next position and drafts behind it, as far as its grammar allows them, for the step
        that is planned now and launched next. None in flight samples for it."""
        masks = [b""] * (len(drafts) + 1)
        if self._matcher is not None:
            masks = self._matcher.allowed_behind(self.tokens, self._num_prompt, drafts)
        position, first = self.position, self.num_computed_tokens
        history = self.tokens if self._sampling.needs_history else ()
        rows = (self._row(position + i, mask, () if i else history) for i, mask in enumerate(masks))
        self.drafts = drafts[: len(masks) - 1]
        self.num_computed_tokens += len(masks)
        self.in_flight = 1
        return Chunk(
            self.id,
            (*self._last, *self.drafts),
            first,
            self._extents,
            tuple(rows),
            adapter=self.adapter,
            num_drafts=len(self.drafts),
        )

    def _row(self, position: int, allowed: bytes, history: Tokens[int]) -> SampleRow:
        banned = self.rule.banned(position)
        # An answer that is complete has to end, however early.
        if allowed and banned and not _leaves_some(allowed, banned):
            banned = ()
        fields = self.id, self.key.choice, position, self._sampling, banned
        return SampleRow(*fields, history, self._num_prompt, allowed)

    def without_token(self) -> BatonError:
        """What went wrong when nothing could be drawn for it."""
        if self._matcher is not None and self._matcher.stuck:
            return InvalidArgument(self._matcher.stuck, field="grammar")
        return Internal("The model gave no token for this sequence.")

    def accept(self, token_id: int, logprobs: Logprobs | None) -> ChoiceTokens:
        """Appends the token of the next position and decides whether it ends the choice."""
        own = self._own
        if not own:
            own = self.tokens = self._own = list(self.tokens)
        own.append(token_id)
        size = len(own)
        position = size - self._num_prompt - 1
        self._last = last = (token_id,)
        if logprobs is None:
            added: tuple[Logprobs, ...] = ()
        else:
            added = (logprobs,)
            self.logprobs.append(logprobs)
        rule = self.rule
        if token_id in rule.end_ids or size >= rule.max_positions:
            end = rule.ends(position, token_id)
            return ChoiceTokens(self.key, position, last, added, *end)
        return _made(ChoiceTokens, (self.key, position, last, added, None, None, 0))

    def accept_with_drafts(self, drawn: Iterable[SampledToken]) -> ChoiceTokens:
        """Appends what was drawn behind its last token and behind its drafts, up to the first wrong
        draft or the end of the choice. drawn: at least one."""
        drafts, self.drafts = self.drafts, ()
        made = []
        for i, token in enumerate(drawn):
            made.append(self.accept(token.token_id, token.logprobs))
            ended = made[-1].finish_reason is not None
            if ended or i >= len(drafts) or token.token_id != drafts[i]:
                break
        self.num_computed_tokens = len(self.tokens) - 1
        return made[-1]._replace(
            position=made[0].position,
            token_ids=tuple(one.token_ids[0] for one in made),
            logprobs=tuple(entry for one in made for entry in one.logprobs),
            saved_steps=len(made) - 1,
        )

    def publish(self, pool: BlockPool, end: int) -> None:
        """Puts its full blocks up to a position, which have KV now, into the prefix cache."""
        if self.table is not None and self.chain is not None:
            num_blocks = end // pool.block_size
            self.chain.extend(self.tokens, num_blocks)
            pool.publish(self.table, self.chain, num_blocks)

    def keep_snapshot(self, pool: BlockPool, snapshot: StateSnapshot, end: int) -> None:
        """Has its state behind a position found in the prefix cache, once what is up to there has
        been published. It takes the place of the one made before it, which is worth less."""
        if self.table is None or self.chain is None:
            pool.drop_snapshot(snapshot)
        elif pool.keep(snapshot, self.chain.links[end // pool.block_size - 1]):
            if self.snapshot is not None:
                pool.drop_snapshot(self.snapshot)
            self.snapshot = snapshot

    def release_table(self, pool: BlockPool) -> None:
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
            tuple(self.tokens[self._num_prompt + position :]),
            tuple(self.logprobs[position - first :]),
        )

    def _limit(self) -> None:
        # The last token of a choice gets no KV.
        self.ceiling = self.rule.max_positions - 1
        """`num_computed_tokens` must stay below it."""
        if self.max_unconfirmed:
            ahead = self._num_prompt + self.confirmed + self.max_unconfirmed - 1
            self.ceiling = min(self.ceiling, ahead)
        if self._orphan_ceiling is not None:
            self.ceiling = min(self.ceiling, self._orphan_ceiling)
        self.limit = min(self.room, self.ceiling)


def _leaves_some(allowed: bytes, banned: Iterable[int]) -> bool:
    """Whether bits are left without those of some ids."""
    bits = bytearray(allowed)
    for token_id in banned:
        if token_id >> 3 < len(bits):
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
    return bits.count(0) < len(bits)


def next_chunks(
    sequences: Iterable[Sequence], drafts: Mapping[int, Tokens[int]]
) -> tuple[list[Chunk], int]:
    """The next position of each, for the step that is planned now and launched next; and how many
    positions they look back on together. drafts: what some compute behind it, by sequence id.

    One loop for all, because a call for each would cost as much as what it does.
    """
    chunks = []
    context = 0
    for one in sequences:
        position, in_flight = one.num_computed_tokens, one.in_flight
        if drafts and one.id in drafts:
            chunks.append(one.chunk_with(drafts[one.id]))
            context += position
            continue
        num_prompt = one._num_prompt
        context += position
        end = position + 1
        if end >= one._plain_from:
            fields = (one.id, one.key[1], end - num_prompt, one._sampling, (), (), num_prompt, b"")
            row = _made(SampleRow, fields)
        else:
            row = one.sample_row()
        one.num_computed_tokens = end
        one.in_flight = in_flight + 1
        token_ids = _PENDING_ID if in_flight else one._last
        values = (one.id, token_ids, position, one._extents, (row,), None, one.adapter, (), 0)
        chunks.append(_made(Chunk, values))
    return chunks, context


_LIKELY_GROWTH = 512
"""Positions that a sequence is expected to grow by where its request allows more."""


class SequenceGroup:
    """One input on its way to KV, and the sequences that go on from it.

    A prompt with n choices is computed or collected once. Its sequences run each on its own when
    KV is complete: one takes the group's table, each of the others got a fork of it, with room to
    grow, when blocks were taken, so that blocks cannot run out in between. A preempted sequence
    becomes a group of one again; what its launched steps still sample becomes part of the input.
    """

    def __init__(
        self, sequences: list[Sequence], chain: PrefixChain, now: float, *, resumed: bool = False
    ):
        first = sequences[0]
        attempt = first.attempt
        self.id = first.id
        self.key: AttemptKey = attempt.key
        self.priority = attempt.priority
        self.sequences = sequences
        """Those that have not ended."""
        self.first = first
        self.chain = chain
        self.arrived = now
        """A clock reading, in seconds."""
        self.due = now
        """From when on a step is worth running for it: a clock reading, in seconds."""
        self.started: float | None = None
        """When it got its blocks: a clock reading, in seconds."""
        remaining_s = None if resumed else attempt.remaining_s
        self.deadline = None if remaining_s is None else now + remaining_s
        """A clock reading after which it need not start. What the client got cannot be taken back,
        so a resumed group has none."""
        self.resumed = resumed
        """Whether its sequence has run before."""
        self.blocked = False
        """Whether it was refused room, or lost it."""
        self.keep = False
        """Whether its KV is kept for another worker when all of it is computed."""
        self.receiver = ""
        """The worker whose share of the pool its blocks count against, or empty."""
        num_top = None if resumed else attempt.prompt_logprobs
        self.scores = None if num_top is None else Gathered(num_top)
        """What is known of its own tokens; None when they are not scored."""
        self.stored: SwapGrant | None = None
        """The swap memory that keeps all its KV while it waits."""
        self.table: BlockTable | None = None
        self.computed = 0
        """Leading positions that have KV once all launched steps are done."""
        self.cached = 0
        """Those of them that came from the prefix cache."""
        self.snapshots_at: tuple[int, ...] = ()
        """Positions behind which its state is worth keeping: where it parts from what the prefix
        cache knows, and near its end."""
        self.in_flight = 0
        """Launched steps that compute some of it."""

    @property
    def tenant(self) -> str:
        return self.first.attempt.tenant

    @property
    def weight(self) -> float:
        return self.first.attempt.weight

    @property
    def tokens(self) -> Tokens[int]:
        return self.first.tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """What is known of its tokens, if they are scored."""
        return None if self.scores is None else self.scores.whole()

    @property
    def remaining(self) -> int:
        """Positions that no launched step computes yet."""
        return len(self.first.tokens) - self.computed

    @property
    def must_wait(self) -> bool:
        """Whether its next token would be too far ahead of confirmed positions."""
        return any(sequence.must_wait for sequence in self.sequences)

    @property
    def unsettled(self) -> bool:
        """Whether launched steps still work on it or sample for it: it cannot start over yet."""
        return self.in_flight > 0 or any(sequence.in_flight for sequence in self.sequences)

    @property
    def num_tables(self) -> int:
        """Block tables that it and its sequences own."""
        return (self.table is not None) + sum(s.table is not None for s in self.sequences)

    def positions_with_room(self, headroom: int) -> int:
        """Positions to own at the start: the input and as much growth as its choices can need.

        The last token of a choice never gets KV.
        """
        size = len(self.tokens)
        return max(size, min(size + headroom, self.sequences[0].rule.max_positions - 1))

    def blocks_wanted(self, pool: BlockPool, headroom: int) -> tuple[int, int]:
        """Blocks of the first table, and of each fork beyond those that it shares."""
        whole = pool.blocks_for(self.positions_with_room(headroom))
        return whole, whole - len(self.tokens) // pool.block_size

    def take_blocks(
        self,
        pool: BlockPool,
        *,
        max_cached: int,
        headroom: int | None = None,
        keep_free: int = 0,
        computes: bool = True,
    ) -> bool:
        """Takes blocks for the input, or none at all.

        max_cached: positions that may come from the prefix cache; none of an input that is scored,
        because the logits of all its positions are needed. headroom: also take what all
        sequences need until each has grown by so many positions; None: they do not run here.
        keep_free: blocks to leave free. computes: whether the rest is computed here; otherwise the
        state behind it comes from where the rest does.
        """
        size, count = pool.block_size, len(self.tokens)
        if self.scores is not None:
            max_cached = 0
        self.chain.extend(self.tokens, count // size)
        whole, fork = self.blocks_wanted(pool, headroom or 0)
        forks = [] if headroom is None else self.sequences[1:]
        keep_free += fork * len(forks)
        grown = whole if headroom is None else self.blocks_wanted(pool, _LIKELY_GROWTH)[0]
        room = max(0, grown - whole)
        self.table = pool.allocate(
            whole,
            self.chain,
            max_cached // size,
            keep_free,
            room,
            computes=count if computes else 0,
        )
        if self.table is None:
            return False
        self.computed = self.cached = self.table.num_cached * size
        self.snapshots_at = ()
        if pool.state_blocks and computes:
            every = pool.snapshot_positions
            ends = {end // every * every for end in (self.table.num_known * size, count - 1)}
            self.snapshots_at = tuple(
                end for end in sorted(ends) if end > self.cached and pool.snapshot_worth(end, count)
            )
        for sequence in forks:
            sequence.table = pool.fork(self.table, len(self.tokens), whole, room)
        return True

    def next_chunk(self, budget: int, block_size: int) -> Chunk:
        """The next positions, for the step that is planned now and launched next.

        budget: at least one block, or all that remains. A chunk that is not the last one ends where
        a block ends, so that whole blocks travel.
        """
        assert self.table is not None
        first, end = self.computed, len(self.tokens)
        rows: tuple[SampleRow, ...] = ()
        scored = None
        if self.scores is not None:
            budget = min(budget, max(SCORED_POSITIONS, block_size))
        if self.remaining > budget:
            end = (first + budget) // block_size * block_size
        else:
            rows = tuple(sequence.sample_row() for sequence in self.sequences)
        if self.scores is not None:
            scored = Scored(self.tokens[first + 1 : end + 1], self.scores.num_top)
        self.computed = end
        self.in_flight += 1
        return Chunk(
            self.id,
            self.tokens[first:end],
            first,
            self.table.extents,
            rows,
            scored,
            self.first.adapter,
        )

    def note_scores(self, result: StepResult) -> None:
        """Keeps what a step scored of its tokens."""
        for scored in result.scored:
            if scored.sequence_id == self.id and self.scores is not None:
                self.scores.add(scored.first_position, scored.logprobs)

    def publish(self, pool: BlockPool, end: int) -> None:
        """Puts the full blocks up to a position, which have KV now, into the prefix cache."""
        if self.table is not None:
            pool.publish(self.table, self.chain, end // pool.block_size)

    def split(self, pool: BlockPool, *, computed: int, awaited: bool = False) -> None:
        """Gives every sequence its table; the group's own goes to the one that got no fork.

        computed, awaited: see `Sequence.begin`.
        """
        assert self.table is not None
        for sequence in self.sequences:
            if sequence.table is None:
                sequence.table, self.table = self.table, None
                sequence.chain = self.chain
            else:
                sequence.chain = self.chain.fork()
            sequence.begin(pool, computed, awaited=awaited)
        if self.table is not None:
            self.release_table(pool)

    def release_table(self, pool: BlockPool) -> None:
        """Releases the group's own table, if there is one."""
        table, self.table = self.table, None
        if table is not None:
            pool.release(table)

    def release_blocks(self, pool: BlockPool) -> None:
        """Releases everything; the input has to be computed from its start again."""
        self.release_table(pool)
        for sequence in self.sequences:
            sequence.release_table(pool)
        self.computed = self.cached = 0

    def move(self, event: SequenceEvent) -> None:
        """All its sequences take the same step."""
        for sequence in self.sequences:
            sequence.move(event)


def validate_attempt(attempt: Attempt, model: ModelDescription, max_positions: int) -> None:
    """Raises InvalidArgument or ContextLengthExceeded, naming the field, unless this model can run
    the attempt. Ranges that need no model are checked where a message is read, in `rpc.convert`.

    max_positions: an input has fewer, so that one token fits behind it.
    """
    ids = attempt.token_ids
    if ids:
        validate_ids((min(ids), max(ids)), model, "token_ids")
    validate_sizes(attempt, max_positions)
    num_top = attempt.prompt_logprobs
    if num_top is not None and (
        num_top > model.vocab_size or entries_bytes(len(ids), num_top) > MAX_BYTES
    ):
        raise InvalidArgument(
            f"{num_top} alternatives to each of {len(ids)} tokens are too many.",
            field="prompt_logprobs",
        )
    validate_ids((t for t, _ in attempt.sampling.logit_bias), model, "logit_bias")
    validate_ids(attempt.sampling.allowed_token_ids, model, "allowed_token_ids")
    # Below min_tokens the sampler bans these, row by row of one tensor.
    validate_ids(attempt.stop.stop_token_ids, model, "stop_token_ids")


def validate_sizes(attempt: Attempt, max_positions: int) -> None:
    """The part that needs no token's value. Raises as `validate_attempt`."""
    size = len(attempt.token_ids)
    if size == 0:
        raise InvalidArgument("The input has no tokens.", field="token_ids")
    if not 0 < attempt.num_prompt_tokens <= size:
        raise InvalidArgument(
            f"The prompt's length lies between 1 and {size}.", field="num_prompt_tokens"
        )
    if size >= max_positions:
        raise ContextLengthExceeded(
            f"The input has {size} tokens; with room for one more this worker takes at most "
            f"{max_positions - 1}.",
            field="token_ids",
        )
    if not attempt.choices or len(set(attempt.choices)) != len(attempt.choices):
        raise InvalidArgument("Choices are named once each, at least one.", field="choices")
    if attempt.position >= attempt.stop.max_tokens:
        raise InvalidArgument(
            f"There are {attempt.position} output tokens of at most {attempt.stop.max_tokens}.",
            field="max_tokens",
        )


def validate_ids(token_ids: Iterable[int], model: ModelDescription, field: str) -> None:
    """Raises InvalidArgument for what is no token id of this model."""
    if not all(0 <= token_id < model.vocab_size for token_id in token_ids):
        raise InvalidArgument(f"Token ids lie between 0 and {model.vocab_size - 1}.", field=field)
