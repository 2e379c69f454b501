"""SequenceGroup, one input on its way to KV and the sequences that go on from it.

A prompt with n choices is computed or collected once. Its sequences part when KV is complete: one
takes the table over, each of the others got a fork of it, with room to grow, when blocks were
taken, so that nothing can run out in between. A preempted sequence becomes a SequenceGroup again;
what its launched steps still sample becomes part of the input.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from baton.core.kvcache.block_pool import BlockPool, BlockTable, blocks_for
from baton.core.kvcache.prefix import PrefixChain
from baton.core.request.attempt import AttemptKey
from baton.core.request.prompt_logprobs import SCORED_POSITIONS, Gathered, PromptLogprobs
from baton.core.scheduler.plan import Chunk, SampleRow, Scored, StepResult
from baton.core.scheduler.sequence import Sequence, SequenceEvent
from baton.core.scheduler.swap_space import SwapGrant

_LIKELY_GROWTH = 512
"""Positions that a sequence is expected to grow by where its request allows more."""


class SequenceGroup:
    """tokens: the input. computed: leading positions that have KV once all launched steps are done.
    cached: those of them that came from the prefix cache. in_flight: launched steps that compute
    some of it. arrived, started: clock readings in seconds. resumed: its sequences have run before.
    deadline: a clock reading after which it need not start, or None; what was told to the client
    cannot be taken back, so one that is resumed has none here. held_back: it was refused room, or
    lost it. scores: what is known of its own tokens, None when they are not scored. stored: the
    swap memory that keeps all its KV while it waits, or None.
    """

    __slots__ = (
        "arrived",
        "cached",
        "chain",
        "computed",
        "deadline",
        "first",
        "held_back",
        "id",
        "in_flight",
        "key",
        "priority",
        "resumed",
        "scores",
        "sequences",
        "started",
        "stored",
        "table",
    )

    def __init__(
        self, sequences: list[Sequence], chain: PrefixChain, now: float, *, resumed: bool = False
    ):
        first = sequences[0]
        attempt = first.attempt
        self.id = first.id
        self.key: AttemptKey = attempt.key
        self.priority = attempt.priority
        self.sequences = sequences
        self.first = first
        self.chain = chain
        self.arrived = now
        self.started: float | None = None
        remaining_s = None if resumed else attempt.remaining_s
        self.deadline = None if remaining_s is None else now + remaining_s
        self.resumed = resumed
        self.held_back = False
        num_top = None if resumed else attempt.prompt_logprobs
        self.scores = None if num_top is None else Gathered(num_top)
        self.stored: SwapGrant | None = None
        self.table: BlockTable | None = None
        self.computed = 0
        self.cached = 0
        self.in_flight = 0

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

    def blocks_wanted(self, block_size: int, headroom: int) -> tuple[int, int]:
        """Blocks of the first table, and of each fork beyond those that it shares."""
        whole = blocks_for(self.positions_with_room(headroom), block_size)
        return whole, whole - len(self.tokens) // block_size

    def take_blocks(
        self, pool: BlockPool, *, max_cached: int, headroom: int | None = None, keep_free: int = 0
    ) -> bool:
        """Takes blocks for the input, or none at all.

        max_cached: positions that may come from the prefix cache; none of an input that is scored,
        because the logits of all its positions are needed. headroom: also take what all
        sequences need until each has grown by so many positions; None: they do not run here.
        keep_free: blocks to leave free.
        """
        size = pool.block_size
        if self.scores is not None:
            max_cached = 0
        self.chain.extend(self.tokens, len(self.tokens) // size)
        whole, fork = self.blocks_wanted(size, headroom or 0)
        heirs = [] if headroom is None else self.sequences[1:]
        keep_free += fork * len(heirs)
        grown = whole if headroom is None else self.blocks_wanted(size, _LIKELY_GROWTH)[0]
        room = max(0, grown - whole)
        self.table = pool.allocate(whole, self.chain, max_cached // size, keep_free, room)
        if self.table is None:
            return False
        self.computed = self.cached = self.table.num_cached * size
        for sequence in heirs:
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
        return Chunk(self.id, self.tokens[first:end], first, self.table.extents, rows, scored)

    def note_scores(self, result: StepResult) -> None:
        """Keeps what a step says of its tokens."""
        for scored in result.scored:
            if scored.sequence_id == self.id and self.scores is not None:
                self.scores.add(scored.first_position, scored.logprobs)

    def publish(self, pool: BlockPool, end: int) -> None:
        """Lets others find the full blocks up to a position; they have KV now."""
        if self.table is not None:
            pool.publish(self.table, self.chain, end // pool.block_size)

    def hand_on(self, pool: BlockPool, *, reach: int, awaited: bool = False) -> None:
        """Gives every sequence its table; the input's own goes to the one that got no fork.

        reach, awaited: see `Sequence`.
        """
        assert self.table is not None
        for sequence in self.sequences:
            if sequence.table is None:
                sequence.table, self.table = self.table, None
                sequence.chain = self.chain
            else:
                sequence.chain = self.chain.fork()
            sequence.begin(pool.block_size, reach, awaited=awaited)
        if self.table is not None:
            self.give_up_table(pool)

    def give_up_table(self, pool: BlockPool) -> None:
        """Releases the input's own table, if there is one."""
        table, self.table = self.table, None
        if table is not None:
            pool.release(table)

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Releases everything; the input has to be computed from its start again."""
        self.give_up_table(pool)
        for sequence in self.sequences:
            sequence.give_up_table(pool)
        self.computed = self.cached = 0

    def move(self, event: SequenceEvent) -> None:
        """All its sequences take the same step."""
        for sequence in self.sequences:
            sequence.move(event)
