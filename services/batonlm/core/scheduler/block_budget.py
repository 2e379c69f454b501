"""BlockBudget, who gets a worker's blocks and places, and who has to give them up.

Blocks come with growth headroom: nothing is admitted unless it and all that runs can grow by
`headroom` positions, so that nothing is admitted only to preempt something else. When blocks run
out all the same, or something more important does not fit, the least important and latest is
preempted. Where sequences stop after their first token nothing grows and nothing is preempted.
Sequences whose routers are gone go first, and for good: who knows whether anybody comes for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from batonlm.core.errors import BatonError, Cancelled, InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool, SwapGrant, SwapPlace, SwapSpace
from batonlm.core.request.attempt import AttemptKey
from batonlm.core.scheduler.plan import BlockSwap, StepWork
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.sequence import Sequence, SequenceGroup
from batonlm.core.scheduler.sequence_table import SequenceTable, rank
from batonlm.core.scheduler.step_cost import StepCost

RESERVATION_S = 0.5
"""Longer than steps take, and short for those who wait if the attempt is not tried again."""


class Reservation:
    """Room that is being made for one attempt whose KV another worker will hand over.

    What was taken for it from the less important comes free only with the steps in flight. Until
    then only what is more important may take it. One reservation is made at a time, for a short
    while; the attempt is tried again meanwhile. Times are readings of the scheduler's clock, in
    seconds.
    """

    def __init__(self) -> None:
        self._key: AttemptKey | None = None
        self._priority = 0
        self._until = 0.0

    def make(self, key: AttemptKey, priority: int, now: float) -> None:
        self._key, self._priority, self._until = key, priority, now + RESERVATION_S

    def drop(self, key: AttemptKey) -> None:
        """Ends the reservation if it is this attempt's."""
        if self._key == key:
            self._key = None

    def is_of(self, key: AttemptKey, now: float) -> bool:
        return self._key == key and now < self._until

    def outranks(self, priority: int, now: float) -> bool:
        """Whether room must not go to a group of this priority now."""
        return self._key is not None and now < self._until and self._priority <= priority

    @property
    def until(self) -> float | None:
        """When it lapses, or None when there is none."""
        return None if self._key is None else self._until


RECOMPUTE = "recompute"


class BlockBudget:
    """Who gets blocks and places, and who is preempted for whom."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        cost: StepCost,
        policy: SchedulerPolicy,
        fail: Callable[[Sequence, BatonError], None],
    ):
        """fail: ends a sequence with an error."""
        self._fail = fail
        self.swapping = Swapping(pool, sequences.swap, cost)
        self.preemptions: Counter[str] = Counter()
        """How often blocks were taken from what ran, by what became of its KV."""
        self._pool = pool
        self._sequences = sequences
        self._cost = cost
        self._policy = policy
        self._swapped: list[SequenceGroup] = []

    def check(self, group: SequenceGroup) -> None:
        """Raises InvalidArgument when its choices can never own enough blocks at once."""
        if self._policy.first_token_only:
            return
        choices = len(group.sequences)
        too_many = choices > self._policy.max_sequences
        if too_many or self._wanted(group) > self._pool.num_blocks:
            raise InvalidArgument(
                f"This worker cannot run {choices} choices of this input at once.", field="n"
            )

    def take(self, group: SequenceGroup, max_cached: int, *, computes: bool = True) -> bool:
        """Gives a group its blocks, or nothing at all; then it is blocked. computes: see
        `SequenceGroup.take_blocks`."""
        if self._policy.first_token_only:
            taken = group.take_blocks(self._pool, max_cached=max_cached)
        else:
            taken = (
                self._has_places(group)
                and self._keeps_target(group)
                and self._pool.num_free + len(group.tokens) // self._pool.block_size
                >= self._wanted(group)
                and group.take_blocks(
                    self._pool,
                    max_cached=max_cached,
                    headroom=self._policy.headroom,
                    keep_free=self.blocks_to_keep(),
                    computes=computes,
                )
            )
        group.blocked = not taken
        return taken

    def admit(self, group: SequenceGroup, now: float) -> bool:
        """Gives a waiting group its blocks, or nothing at all. Preempts what is less important."""
        # The last position of an input is always computed, for its logits.
        most_cached, computes = len(group.tokens) - 1, group.stored is None
        return self.take(group, most_cached, computes=computes) or (
            self.make_room(group, now, may_swap=True)
            and self.take(group, most_cached, computes=computes)
        )

    def make_room(self, group: SequenceGroup, now: float, *, may_swap: bool) -> bool:
        """Preempts less important ones until a group that was refused fits, in blocks, places and
        the time of a step, if that can help.

        What they gave comes free at once, or with the steps in flight. Returns whether there is
        more room now or then.
        """
        lesser = [v for v in self._victims() if v.priority > group.priority]
        if not lesser:
            return False
        free = self._pool.num_free + self._pool.num_returning
        gain = sum(len(v.table.blocks) for v in lesser if v.table is not None)
        wanted = self._wanted(group)
        if wanted > free + gain or not self._keeps_target(group, lesser):
            return False
        made = False
        for victim in sorted(lesser, key=rank, reverse=True):
            fits = self._has_places(group) and self._keeps_target(group)
            if fits and free >= wanted + self.blocks_to_keep():
                break
            assert victim.table is not None
            free += len(victim.table.blocks)
            self.preempt(victim, now, may_swap=may_swap)
            made = True
        return made

    def grow(
        self, short: list[Sequence], others: list[Sequence], now: float, *, in_flight: bool
    ) -> list[Sequence]:
        """Adds a block to each of the short; returns all that have one for their next position.

        others: who else runs in the step. in_flight: whether steps are; then blocks that are given
        up return only when they are done.
        """
        grown: list[Sequence] = []
        awaited = 0
        for sequence in sorted(short, key=rank):
            while sequence.table is not None and not self._pool.grow(sequence.table):
                if awaited < self._pool.num_returning:
                    awaited += 1
                    break
                victim = max(self._victims(), key=rank)
                if in_flight and not any(s.table for s in (*others, *grown) if s is not victim):
                    # The step would compute nothing: first let those in flight end.
                    break
                self.preempt(victim, now, may_swap=True)
            else:
                grown.append(sequence)
        grown = [sequence for sequence in grown if sequence.table is not None]
        for sequence in grown:
            sequence.settle(self._pool)
        return [s for s in others if s.table is not None] + grown

    def preempt(self, victim: Sequence | SequenceGroup, now: float, *, may_swap: bool) -> None:
        """Takes the blocks of a running sequence or of a group being computed; it waits again, or
        ends, if its router is gone."""
        stored = None
        if isinstance(victim, Sequence) and victim.orphaned:
            self._fail(victim, Cancelled("Others need the room of a sequence without a router."))
            return
        if isinstance(victim, SequenceGroup):
            self._sequences.put_back(victim)
        else:
            stored = self.swapping.store(victim) if may_swap else None
            group = self._sequences.preempt(victim, now, stored)
            if stored is not None:
                self._swapped.append(group)
        self.preemptions[RECOMPUTE if stored is None else f"swap_{stored.place.value}"] += 1

    def launched(self, step: int) -> None:
        """The planned step starts, with what is to be moved in it."""
        self.swapping.launched(step)
        self._swapped.clear()

    def dropped(self) -> None:
        """There is nothing to compute, so nothing is moved: what was swapped is computed again."""
        for group in self._swapped:
            self._compute_again(group)
        self._swapped.clear()
        self.swapping.dropped()

    def forget(self, sequence: Sequence) -> None:
        """What swap memory keeps of a preempted sequence, if it does, is worth nothing."""
        group = self._sequences.group_of(sequence)
        if group is not None and group.stored is not None:
            self._compute_again(group)

    def _compute_again(self, group: SequenceGroup) -> None:
        assert group.stored is not None
        self.preemptions[f"swap_{group.stored.place.value}"] -= 1
        self.preemptions[RECOMPUTE] += 1
        self._sequences.drop_stored(group)

    def _victims(self) -> list[Sequence | SequenceGroup]:
        """All that could be preempted. What arrives from another worker, or is kept for one, could
        not."""
        if self._policy.first_token_only:
            return []
        return [*self._sequences.running.values(), *self._sequences.prefilling]

    def _wanted(self, group: SequenceGroup) -> int:
        """Blocks that a group and its sequences take, with headroom."""
        whole, fork = group.blocks_wanted(self._pool, self._policy.headroom)
        return whole + fork * (len(group.sequences) - 1)

    def _has_places(self, group: SequenceGroup) -> bool:
        return self._sequences.num_owning + len(group.sequences) <= self._policy.max_sequences

    def _keeps_target(
        self, group: SequenceGroup, without: Iterable[Sequence | SequenceGroup] = ()
    ) -> bool:
        """Whether all that owns blocks but these, and this one, can run in one step in time."""
        if not self._policy.target_step_s:
            return True
        gone = set(map(id, without))
        context = len(group.tokens) * len(group.sequences)
        owning = self._sequences.num_owning
        for running in self._sequences.running.values():
            if id(running) in gone:
                owning -= 1
            else:
                context += running.num_computed_tokens
        for other in (*self._sequences.prefilling, *self._sequences.arriving.values()):
            if id(other) in gone:
                owning -= len(other.sequences)
            else:
                context += len(other.tokens) * len(other.sequences)
        work = StepWork(owning + len(group.sequences), context)
        return not owning or self._cost.predict(work) <= self._policy.target_step_s

    def blocks_to_keep(self) -> int:
        """Blocks that all running sequences still need to grow by the headroom."""
        headroom = self._policy.headroom
        missing = 0
        for sequence in self._sequences.running.values():
            assert sequence.table is not None
            most = min(len(sequence.tokens) + headroom, sequence.rule.max_positions - 1)
            missing += max(0, self._pool.blocks_for(most) - len(sequence.table.blocks))
        return missing


_SHORT_BLOCKS = 4
"""A context of no more blocks is computed again while nothing is known: one small chunk does it."""

_NEWEST = 0.2
"""Weight of the newest measurement."""

_FADE = 0.95


class Swapping:
    """What becomes of a preempted sequence's KV: it is moved to swap memory, or computed again.

    The cheaper one is taken, as measured: seconds per swapped block, both ways, against seconds per
    prefilled position. While one of them is not known, all but short contexts are swapped, which
    measures it. Each choice against swapping lets the measured time fade a little, so that one slow
    move does not count for ever.
    """

    def __init__(self, pool: BlockPool, space: SwapSpace, cost: StepCost):
        self._pool = pool
        self._space = space
        self._cost = cost
        self._block_s: dict[SwapPlace, float] = {}
        self._moves: dict[int, Counter[SwapPlace]] = {}
        self._restored: list[SwapGrant] = []
        self._moved: Counter[SwapPlace] = Counter()
        self.swap_out: list[BlockSwap] = []
        self.swap_in: list[BlockSwap] = []
        """Both are the moves of the step that is planned now."""

    def store(self, sequence: Sequence) -> SwapGrant | None:
        """Has a running sequence's KV moved out by the step that is planned now.

        None when it cannot be kept or need not be: then it has to be computed again.
        """
        table = sequence.table
        # A fork that has not run here yet does not have its own blocks' content.
        if table is None or table.copies:
            return None
        count = self._pool.blocks_for(sequence.num_computed_tokens)
        place = self._space.place_for(count)
        if place is None or not self._worth(place, count, sequence):
            return None
        grant = self._space.take(place, count)
        self.swap_out.append(BlockSwap(tuple(table.blocks[:count]), grant.blocks))
        self._moved[place] += count
        return grant

    def fetch(self, group: SequenceGroup) -> None:
        """Has the KV of one that got blocks again moved in by the step that is planned now.

        What the prefix cache still had is left out.
        """
        grant, table = group.stored, group.table
        assert grant is not None and table is not None
        group.stored = None
        self._restored.append(grant)
        # Of drafts that were wrong it may keep more than the table has room for.
        state, end = self._pool.state_blocks, min(len(grant.blocks), len(table.blocks))
        missing = (*range(state), *range(state + table.num_cached, end))
        if blocks := tuple(table.blocks[i] for i in missing):
            self.swap_in.append(BlockSwap(blocks, tuple(grant.blocks[i] for i in missing)))
            self._moved[grant.place] += len(blocks)

    def launched(self, step: int) -> None:
        """The planned step starts: its moves are under way."""
        self._space.launched(step)
        for swap in self.swap_out:
            self._pool.withhold(swap.blocks)
        for grant in self._restored:
            self._space.release(grant)
        if self._moved:
            self._moves[step] = self._moved
            self._moved = Counter()
        self._restored, self.swap_out, self.swap_in = [], [], []

    def completed(self, step: int, swap_s: float) -> None:
        """A step is done; its moves took so many seconds."""
        self._space.completed(step)
        moved = self._moves.pop(step, None)
        # A step that moved blocks to both kinds does not show which one took the time.
        if moved is not None and len(moved) == 1:
            ((place, count),) = moved.items()
            known = self._block_s.get(place, swap_s / count)
            self._block_s[place] = known + _NEWEST * (swap_s / count - known)

    def dropped(self) -> None:
        """The planned step does not come to be, and moves nothing. Nothing was to be fetched."""
        self.swap_out = []
        self._moved = Counter()

    def _worth(self, place: SwapPlace, count: int, sequence: Sequence) -> bool:
        block_s = self._block_s.get(place)
        position_s = self._cost.prefill_position_s
        if block_s is None or position_s is None:
            return sequence.num_computed_tokens > _SHORT_BLOCKS * self._pool.block_size
        assert sequence.table is not None
        # Of a state, which is nobody else's, the last copy may be gone by then: all of it counts.
        shared = self._pool.num_shared(sequence.table) * self._pool.block_size
        worth = 2 * count * block_s <= max(0, sequence.num_computed_tokens - shared) * position_s
        if not worth:
            self._block_s[place] = block_s * _FADE
        return worth
