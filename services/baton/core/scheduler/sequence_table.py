"""SequenceTable, who is on a decode worker and where in its life.

Every sequence is in exactly one place, and its state says which: `waiting` (QUEUED and SWAPPED),
`prefilling`, `arriving`, `running`, or `held`. The first three hold inputs, shared by sequences
until their KV is complete. Whoever leaves goes through `end`, which gives back all that it owns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from baton.core.errors import NotFound
from baton.core.kvcache.block_pool import BlockPool, InvariantBroken, SwapGrant, SwapSpace
from baton.core.request.attempt import AttemptKey, SequenceKey
from baton.core.scheduler.scheduler import Load
from baton.core.scheduler.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceState

# Waiting, the inputs that have no blocks yet, most important first; decides nothing.
#
# It counts as it goes, so that a long queue costs a step nothing.


class Ranked(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def id(self) -> int: ...


def rank(one: Ranked) -> tuple[int, int]:
    """Smaller is more important: priority class, then arrival."""
    return one.priority, one.id


class Waiting:
    """num_sequences and num_tokens: how many wait, and how many positions they wait to compute."""

    def __init__(self) -> None:
        self._inputs: list[SequenceGroup] = []
        self._tokens: dict[int, int] = {}
        self._earliest: float | None = None
        self.num_sequences = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._inputs)

    def add(self, shared: SequenceGroup) -> None:
        insort(self._inputs, shared, key=rank)
        tokens = 0 if shared.stored else shared.remaining
        self._tokens[shared.id] = tokens
        self.num_tokens += tokens
        self.num_sequences += len(shared.sequences)
        if shared.deadline is not None:
            known = self._earliest
            self._earliest = shared.deadline if known is None else min(known, shared.deadline)

    def remove(self, shared: SequenceGroup) -> None:
        """With the sequences that it still has. Raises KeyError if it does not wait."""
        self.num_tokens -= self._tokens.pop(shared.id)
        del self._inputs[bisect_left(self._inputs, rank(shared), key=rank)]
        self.num_sequences -= len(shared.sequences)

    def hold_back(self, priority: int) -> bool:
        """Whether one as important was refused room, or lost it, and could go on with it."""
        return any(
            shared.held_back and shared.priority <= priority and not shared.must_wait
            for shared in self._inputs
        )

    def expired(self, now: float) -> list[SequenceGroup]:
        """Those whose deadline is over; the caller removes them."""
        if self._earliest is None or now < self._earliest:
            return []
        deadlines = [s.deadline for s in self._inputs if s.deadline is not None]
        self._earliest = min((d for d in deadlines if d > now), default=None)
        return [s for s in self._inputs if s.deadline is not None and s.deadline <= now]


class SequenceTable:
    """running is by sequence id, in order of joining; arriving by attempt; held is what ran here
    and keeps its blocks for another worker. swap: where those that wait may keep their KV."""

    def __init__(self, pool: BlockPool, swap: SwapSpace):
        self._pool = pool
        self.swap = swap
        self.waiting = Waiting()
        self.prefilling: list[SequenceGroup] = []
        self.arriving: dict[AttemptKey, SequenceGroup] = {}
        self.running: dict[int, Sequence] = {}
        self.held: dict[SequenceKey, Sequence] = {}
        self._attempts: dict[AttemptKey, dict[int, Sequence]] = {}
        self._input_of: dict[int, SequenceGroup] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._attempts

    def __len__(self) -> int:
        """Attempts with a sequence that has not ended."""
        return len(self._attempts)

    @property
    def num_owning(self) -> int:
        """Sequences that own blocks."""
        inputs = (*self.prefilling, *self.arriving.values())
        owning = len(self.running) + len(self.held)
        return owning + sum(len(shared.sequences) for shared in inputs)

    @property
    def num_stored(self) -> int:
        """Sequences whose KV is in swap memory."""
        return self.swap.num_grants

    @property
    def load(self) -> Load:
        computing = sum(shared.remaining for shared in self.prefilling)
        return Load(
            waiting_sequences=self.waiting.num_sequences,
            waiting_tokens=self.waiting.num_tokens + computing,
            running_sequences=self.num_owning,
            free_blocks=self._pool.num_free,
            swap_free=self.swap.num_free,
            swap_used=self.swap.num_used,
        )

    def choices(self, key: AttemptKey) -> dict[int, Sequence]:
        """An attempt's sequences that have not ended, by choice."""
        return dict(self._attempts.get(key, {}))

    def find(self, key: SequenceKey) -> Sequence | None:
        return self._attempts.get(AttemptKey(key.request_id, key.attempt), {}).get(key.choice)

    def reserved(self, key: AttemptKey) -> SequenceGroup:
        """Raises NotFound for an attempt that is not reserved here (any more)."""
        shared = self.arriving.get(key)
        if shared is None:
            raise NotFound("This attempt is not reserved here.")
        return shared

    def held_one(self, key: SequenceKey) -> Sequence:
        """Raises NotFound for a sequence that is not held here (any more)."""
        sequence = self.held.get(key)
        if sequence is None:
            raise NotFound("This sequence is not held here.")
        return sequence

    def wait(self, shared: SequenceGroup) -> None:
        """An attempt enters, to be computed here."""
        self._enter(shared)
        self.waiting.add(shared)

    def expect(self, shared: SequenceGroup) -> None:
        """An attempt enters; it owns blocks and its KV comes from elsewhere."""
        self._enter(shared)
        shared.move(SequenceEvent.RESERVE)
        self.arriving[shared.key] = shared

    def start(self, shared: SequenceGroup) -> None:
        """A waiting input got its blocks."""
        self.waiting.remove(shared)
        shared.move(SequenceEvent.START)
        self.prefilling.append(shared)

    def part(self, shared: SequenceGroup, *, awaited: bool) -> None:
        """An input's KV is complete, or will be with a launched step, whose tokens are awaited: its
        sequences run, each on its own."""
        if shared in self.prefilling:
            self.prefilling.remove(shared)
        else:
            del self.arriving[shared.key]
        shared.hand_on(self._pool, reach=len(shared.tokens), awaited=awaited)
        shared.move(SequenceEvent.READY)
        for sequence in shared.sequences:
            del self._input_of[sequence.id]
            self.running[sequence.id] = sequence

    def put_back(self, shared: SequenceGroup) -> None:
        """Takes the blocks of an input being computed; it waits again."""
        self.prefilling.remove(shared)
        shared.give_up_blocks(self._pool)
        shared.move(SequenceEvent.PREEMPT)
        shared.held_back = True
        self.waiting.add(shared)

    def preempt(self, sequence: Sequence, now: float, stored: SwapGrant | None) -> SequenceGroup:
        """Takes the blocks of a running sequence; it waits again. stored: what keeps its KV."""
        del self.running[sequence.id]
        sequence.give_up_table(self._pool)
        assert sequence.chain is not None
        shared = SequenceGroup([sequence], sequence.chain, now, resumed=True)
        shared.stored = stored
        shared.held_back = True
        shared.move(SequenceEvent.PREEMPT if stored is None else SequenceEvent.SWAP)
        self._input_of[sequence.id] = shared
        self.waiting.add(shared)
        return shared

    def restore(self, shared: SequenceGroup) -> Sequence:
        """A sequence whose KV swap memory kept has blocks again and runs on."""
        self.waiting.remove(shared)
        (sequence,) = shared.sequences
        shared.hand_on(self._pool, reach=len(shared.tokens) - 1)
        sequence.move(SequenceEvent.RESTORE)
        del self._input_of[sequence.id]
        self.running[sequence.id] = sequence
        return sequence

    def hold(self, sequence: Sequence) -> None:
        """A running sequence stops; what is launched still counts. Its blocks stay till its end."""
        sequence.move(SequenceEvent.HOLD)
        del self.running[sequence.id]
        self.held[sequence.key] = sequence

    def forget_stored(self, shared: SequenceGroup) -> None:
        """The KV of one that waits is not kept after all: it has to be computed again."""
        self.waiting.remove(shared)
        self._give_up_stored(shared)
        shared.move(SequenceEvent.PREEMPT)
        self.waiting.add(shared)

    def end(self, sequence: Sequence, event: SequenceEvent) -> None:
        """The one place where a sequence leaves."""
        waits = sequence.state in (SequenceState.QUEUED, SequenceState.SWAPPED)
        sequence.move(event)
        self.running.pop(sequence.id, None)
        self.held.pop(sequence.key, None)
        shared = self._input_of.pop(sequence.id, None)
        if shared is not None:
            if waits:
                self.waiting.num_sequences -= 1
            shared.sequences.remove(sequence)
            if not shared.sequences:
                self._forget(shared, waits)
        sequence.give_up_table(self._pool)
        key = sequence.attempt.key
        del self._attempts[key][sequence.key.choice]
        if not self._attempts[key]:
            del self._attempts[key]

    def check(self) -> None:
        """Raises InvariantBroken unless all that is owned belongs to someone here."""
        self._pool.check()
        self.swap.check()
        inputs = (*self.waiting, *self.prefilling, *self.arriving.values())
        alone = len(self.running) + len(self.held)
        tables = sum(shared.num_tables for shared in inputs) + alone
        if tables != self._pool.num_tables:
            raise InvariantBroken(f"{self._pool.num_tables} tables are owned, {tables} in use")
        grants = sum(shared.stored is not None for shared in inputs)
        if grants != self.swap.num_grants:
            raise InvariantBroken(f"{self.swap.num_grants} swap grants are owned, {grants} in use")
        if sum(len(shared.sequences) for shared in self.waiting) != self.waiting.num_sequences:
            raise InvariantBroken("waiting sequences are miscounted")
        here = alone + sum(len(shared.sequences) for shared in inputs)
        if here != sum(len(choices) for choices in self._attempts.values()):
            raise InvariantBroken("a sequence is in no place, or in two")

    def _enter(self, shared: SequenceGroup) -> None:
        self._attempts[shared.key] = {s.key.choice: s for s in shared.sequences}
        for sequence in shared.sequences:
            self._input_of[sequence.id] = shared

    def _forget(self, shared: SequenceGroup, waits: bool) -> None:
        """Drops an input that no sequence needs any more."""
        shared.give_up_table(self._pool)
        if waits:
            self.waiting.remove(shared)
            self._give_up_stored(shared)
        elif shared in self.prefilling:
            self.prefilling.remove(shared)
        else:
            del self.arriving[shared.key]

    def _give_up_stored(self, shared: SequenceGroup) -> None:
        stored, shared.stored = shared.stored, None
        if stored is not None:
            self.swap.release(stored)
