"""Room, who gets a decode worker's blocks and places, and who has to give them up.

Blocks come with growth headroom: nothing is let in unless it and all that runs can grow by
`headroom` positions, so nobody is let in only to push somebody out. When blocks run out all the
same, or something more important does not fit, the least important and latest is preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.core.errors import InvalidArgument
from baton.core.kvcache.block_pool import BlockPool
from baton.core.request.attempt import AttemptKey
from baton.core.scheduler.plan import StepWork
from baton.core.scheduler.sequence import Sequence, SequenceGroup
from baton.core.scheduler.sequence_table import SequenceTable, rank
from baton.core.scheduler.step_cost import StepCost
from baton.core.scheduler.swapping import Swapping

# Claim, room that is being made for one reservation.
#
# What was taken for it from the less important comes free only with the steps in flight. Until then
# nobody may take it who is not more important than the claim. One claim is held at a time, for a
# short while; whoever has it asks again.

CLAIM_S = 0.5
"""Longer than steps take, and short for those who wait if nobody asks again."""


class Reservation:
    """Times are readings of the scheduler's clock, in seconds."""

    def __init__(self) -> None:
        self._key: AttemptKey | None = None
        self._priority = 0
        self._until = 0.0

    def hold(self, key: AttemptKey, priority: int, now: float) -> None:
        self._key, self._priority, self._until = key, priority, now + CLAIM_S

    def drop(self, key: AttemptKey) -> None:
        """Ends the claim if it is this attempt's."""
        if self._key == key:
            self._key = None

    def is_of(self, key: AttemptKey, now: float) -> bool:
        return self._key == key and now < self._until

    def outranks(self, priority: int, now: float) -> bool:
        """Whether room must not go to somebody of this priority now."""
        return self._key is not None and now < self._until and self._priority <= priority

    @property
    def until(self) -> float | None:
        """When it lapses, or None when there is none."""
        return None if self._key is None else self._until


RECOMPUTE = "recompute"


class BlockBudget:
    """max_sequences: how many own blocks at once. headroom: positions that all that is let in can
    grow. target_step_s: predicted seconds of a step that nothing new is let in beyond; 0: no limit.
    preemptions: how often each fate was met, by name.
    """

    def __init__(
        self,
        pool: BlockPool,
        roster: SequenceTable,
        swapping: Swapping,
        cost: StepCost,
        *,
        max_sequences: int,
        headroom: int,
        target_step_s: float,
    ):
        self._pool = pool
        self._roster = roster
        self._swapping = swapping
        self._cost = cost
        self._max_sequences = max_sequences
        self._headroom = headroom
        self._target_step_s = target_step_s
        self.preemptions: Counter[str] = Counter()
        self._swapped: list[SequenceGroup] = []

    def check(self, shared: SequenceGroup) -> None:
        """Raises InvalidArgument when its choices can never own enough blocks at once."""
        choices = len(shared.sequences)
        too_many = choices > self._max_sequences
        if too_many or self.wanted(shared) > self._pool.num_blocks:
            raise InvalidArgument(
                f"This worker cannot run {choices} choices of this input at once.", field="n"
            )

    def wanted(self, shared: SequenceGroup) -> int:
        """Blocks that an input and its choices take, with headroom."""
        whole, fork = shared.blocks_wanted(self._pool.block_size, self._headroom)
        return whole + fork * (len(shared.sequences) - 1)

    def take(self, shared: SequenceGroup, max_cached: int) -> bool:
        """Gives an input its blocks, or nothing at all; then it is held back."""
        shared.held_back = not (
            self._has_places(shared)
            and self._keeps_target(shared)
            and self._pool.num_free + len(shared.tokens) // self._pool.block_size
            >= self.wanted(shared)
            and shared.take_blocks(
                self._pool,
                max_cached=max_cached,
                headroom=self._headroom,
                keep_free=self._blocks_to_keep(),
            )
        )
        return not shared.held_back

    def let_in(self, waiting: Iterable[SequenceGroup], budget: int, now: float) -> list[Sequence]:
        """Gives room to those who wait, in order; returns those whose KV was kept: they run on.

        budget: positions that can still be computed in this step. An input of which none could be
        does not begin; whoever needs no prefill may pass it.
        """
        size = self._pool.block_size
        restored = []
        for shared in waiting:
            if shared.must_wait or shared.unsettled:
                continue
            if shared.stored is None and budget < min(shared.remaining, size):
                continue
            # The last position of an input is always computed, for its logits.
            most_cached = len(shared.tokens) - 1
            if not self.take(shared, most_cached) and not (
                self.make(shared, now, may_swap=True) and self.take(shared, most_cached)
            ):
                break
            if shared.stored is None:
                self._roster.start(shared)
                budget -= shared.remaining
            else:
                self._swapping.fetch(shared)
                restored.append(self._roster.restore(shared))
        return restored

    def make(self, shared: SequenceGroup, now: float, *, may_swap: bool) -> bool:
        """Preempts less important ones until an input that was refused fits, in blocks, places and
        the time of a step, if that can help.

        What they gave comes free at once, or with the steps in flight. Returns whether there is
        more room now or then.
        """
        lesser = [v for v in self._victims() if v.priority > shared.priority]
        if not lesser:
            return False
        free = self._pool.num_free + self._pool.num_returning
        gain = sum(len(v.table.blocks) for v in lesser if v.table is not None)
        wanted = self.wanted(shared)
        if wanted > free + gain or not self._keeps_target(shared, lesser):
            return False
        made = False
        for victim in sorted(lesser, key=rank, reverse=True):
            fits = self._has_places(shared) and self._keeps_target(shared)
            if fits and free >= wanted + self._blocks_to_keep():
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
            sequence.settle(self._pool.block_size)
        return [s for s in others if s.table is not None] + grown

    def preempt(self, victim: Sequence | SequenceGroup, now: float, *, may_swap: bool) -> None:
        """Takes the blocks of a running sequence or an input being computed; it waits again."""
        stored = None
        if isinstance(victim, SequenceGroup):
            self._roster.put_back(victim)
        else:
            stored = self._swapping.store(victim) if may_swap else None
            shared = self._roster.preempt(victim, now, stored)
            if stored is not None:
                self._swapped.append(shared)
        self.preemptions[RECOMPUTE if stored is None else f"swap_{stored.place.value}"] += 1

    def launched(self, step: int) -> None:
        """The planned step starts, with what is to be moved in it."""
        self._swapping.launched(step)
        self._swapped.clear()

    def dropped(self) -> None:
        """There is nothing to compute, so nothing is moved: what was swapped is computed again."""
        for shared in self._swapped:
            assert shared.stored is not None
            self.preemptions[f"swap_{shared.stored.place.value}"] -= 1
            self.preemptions[RECOMPUTE] += 1
            self._roster.forget_stored(shared)
        self._swapped.clear()
        self._swapping.dropped()

    def _victims(self) -> list[Sequence | SequenceGroup]:
        """All that could be preempted. What arrives from elsewhere could not."""
        return [*self._roster.running.values(), *self._roster.prefilling]

    def _has_places(self, shared: SequenceGroup) -> bool:
        return self._roster.num_owning + len(shared.sequences) <= self._max_sequences

    def _keeps_target(
        self, shared: SequenceGroup, without: Iterable[Sequence | SequenceGroup] = ()
    ) -> bool:
        """Whether all that owns blocks but these, and this one, can run in one step in time."""
        if not self._target_step_s:
            return True
        gone = set(map(id, without))
        context = len(shared.tokens) * len(shared.sequences)
        owning = self._roster.num_owning
        for running in self._roster.running.values():
            if id(running) in gone:
                owning -= 1
            else:
                context += running.reach
        for other in (*self._roster.prefilling, *self._roster.arriving.values()):
            if id(other) in gone:
                owning -= len(other.sequences)
            else:
                context += len(other.tokens) * len(other.sequences)
        work = StepWork(owning + len(shared.sequences), context)
        return not owning or self._cost.predict(work) <= self._target_step_s

    def _blocks_to_keep(self) -> int:
        """Blocks that all running sequences still need to grow by the headroom."""
        size, headroom = self._pool.block_size, self._headroom
        missing = 0
        for sequence in self._roster.running.values():
            assert sequence.table is not None
            most = min(len(sequence.tokens) + headroom, sequence.rule.max_positions - 1)
            missing += max(0, -(-most // size) - len(sequence.table.blocks))
        return missing
