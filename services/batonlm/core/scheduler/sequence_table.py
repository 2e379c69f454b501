"""SequenceTable, which sequences are on a worker and where in their lives.

Every sequence is in exactly one place, and its state says which: `waiting` (QUEUED and SWAPPED),
`prefilling`, `arriving`, `running`, `held` or `kept` (both HELD). A sequence that runs, or has run,
stands alone; in the other places it stands in the group that shares its input. Every sequence
leaves through `end`, which gives back all that it owns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batonlm.core.errors import NotFound
from batonlm.core.kvcache.block_pool import BlockPool, InvariantBroken, SwapGrant, SwapSpace
from batonlm.core.request.attempt import Attempt, AttemptKey, Logprobs, SequenceKey
from batonlm.core.scheduler.prefixes import PrefixTransfers
from batonlm.core.scheduler.sequence import Sequence, SequenceEvent, SequenceGroup, SequenceState


def rank(one: Sequence | SequenceGroup) -> tuple[int, int]:
    """Smaller is more important: priority class, then arrival."""
    return one.priority, one.id


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a scheduler is."""

    waiting_sequences: int
    waiting_tokens: int
    """Positions that no launched step computes yet."""
    running_sequences: int
    """Those that own blocks, without those whose KV prefill keeps for another worker."""
    free_blocks: int
    """Cached ones included."""
    swap_free: tuple[int, int] = (0, 0)
    """Blocks of swap memory, in host memory and on disk."""
    swap_used: tuple[int, int] = (0, 0)


class WaitingQueue:
    """Groups that have no blocks yet, most important first. It counts as they come and go, so that
    a long queue costs a step little."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._tokens: dict[int, int] = {}
        self._earliest: float | None = None
        self.num_sequences = 0
        self.num_tokens = 0
        """Positions that they wait to compute."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def add(self, group: SequenceGroup) -> None:
        insort(self._groups, group, key=rank)
        tokens = 0 if group.stored else group.remaining
        self._tokens[group.id] = tokens
        self.num_tokens += tokens
        self.num_sequences += len(group.sequences)
        if group.deadline is not None:
            known = self._earliest
            self._earliest = group.deadline if known is None else min(known, group.deadline)

    def remove(self, group: SequenceGroup) -> None:
        """With the sequences that it still has. Raises KeyError if it does not wait."""
        self.num_tokens -= self._tokens.pop(group.id)
        del self._groups[bisect_left(self._groups, rank(group), key=rank)]
        self.num_sequences -= len(group.sequences)

    def blocks(self, priority: int) -> bool:
        """Whether one as important was refused room, or lost it, and could go on with it."""
        return any(
            group.blocked and group.priority <= priority and not group.must_wait
            for group in self._groups
        )

    def expired(self, now: float) -> list[SequenceGroup]:
        """Those whose deadline is over; the caller removes them."""
        if self._earliest is None or now < self._earliest:
            return []
        deadlines = [g.deadline for g in self._groups if g.deadline is not None]
        self._earliest = min((d for d in deadlines if d > now), default=None)
        return [g for g in self._groups if g.deadline is not None and g.deadline <= now]


class SequenceTable:
    """swap: memory where those that wait may keep their KV. forget: called with the id of each
    sequence that leaves."""

    def __init__(
        self,
        pool: BlockPool,
        swap: SwapSpace,
        forget: Callable[[int], object] = lambda sequence_id: None,
    ):
        self._pool = pool
        self._forget = forget
        self.swap = swap
        self.waiting = WaitingQueue()
        self.prefilling: list[SequenceGroup] = []
        self.arriving: dict[AttemptKey, SequenceGroup] = {}
        self.running: dict[int, Sequence] = {}
        """By sequence id, in order of joining."""
        self.held: dict[SequenceKey, Sequence] = {}
        """They ran here and keep their blocks for another worker."""
        self.kept: dict[AttemptKey, SequenceGroup] = {}
        """They were only computed here and keep their blocks for another worker."""
        self.prefixes = PrefixTransfers(pool)
        """No sequence owns what they pin."""
        self._attempts: dict[AttemptKey, dict[int, Sequence]] = {}
        self._group_of: dict[int, SequenceGroup] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._attempts

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that have not ended."""
        for choices in self._attempts.values():
            yield from choices.values()

    def __len__(self) -> int:
        """Attempts with a sequence that has not ended."""
        return len(self._attempts)

    @property
    def num_owning(self) -> int:
        """Sequences that own blocks, without those of `kept`."""
        groups = (*self.prefilling, *self.arriving.values())
        owning = len(self.running) + len(self.held)
        return owning + sum(len(group.sequences) for group in groups)

    @property
    def load(self) -> Load:
        computing = sum(group.remaining for group in self.prefilling)
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

    def group(self, key: AttemptKey) -> SequenceGroup | None:
        """The group that an attempt's sequences still form."""
        first = next(iter(self._attempts.get(key, {}).values()), None)
        return None if first is None else self._group_of.get(first.id)

    def group_of(self, sequence: Sequence) -> SequenceGroup | None:
        """The group that a sequence is part of, as while it waits."""
        return self._group_of.get(sequence.id)

    def reserved(self, key: AttemptKey) -> SequenceGroup:
        """Raises NotFound for an attempt that is not reserved here (any more)."""
        group = self.arriving.get(key)
        if group is None:
            raise NotFound("This attempt is not reserved here.")
        return group

    def enqueue(self, group: SequenceGroup) -> None:
        """An attempt enters; its input is computed here."""
        self._enter(group)
        self.waiting.add(group)

    def expect(self, group: SequenceGroup) -> None:
        """An attempt enters; it owns blocks and its KV comes from elsewhere."""
        self._enter(group)
        group.move(SequenceEvent.RESERVE)
        self.arriving[group.key] = group

    def start(self, group: SequenceGroup) -> None:
        """A waiting group got its blocks."""
        self.waiting.remove(group)
        group.move(SequenceEvent.START)
        self.prefilling.append(group)

    def run(self, group: SequenceGroup, *, awaited: bool) -> None:
        """A group's KV is complete, or will be with a launched step, whose tokens are awaited: its
        sequences run, each on its own."""
        if group in self.prefilling:
            self.prefilling.remove(group)
        else:
            del self.arriving[group.key]
        group.split(self._pool, computed=len(group.tokens), awaited=awaited)
        group.move(SequenceEvent.READY)
        for sequence in group.sequences:
            del self._group_of[sequence.id]
            self.running[sequence.id] = sequence

    def keep(self, group: SequenceGroup) -> None:
        """Nothing more of a group is computed here. Its blocks stay until its end."""
        self.prefilling.remove(group)
        group.move(SequenceEvent.HOLD)
        self.kept[group.key] = group

    def put_back(self, group: SequenceGroup) -> None:
        """Takes the blocks of a group that is being computed; it waits again."""
        self.prefilling.remove(group)
        group.release_blocks(self._pool)
        group.move(SequenceEvent.PREEMPT)
        group.blocked = True
        self.waiting.add(group)

    def preempt(self, sequence: Sequence, now: float, stored: SwapGrant | None) -> SequenceGroup:
        """Takes the blocks of a running sequence; it waits again. stored: what keeps its KV."""
        del self.running[sequence.id]
        sequence.release_table(self._pool)
        assert sequence.chain is not None
        group = SequenceGroup([sequence], sequence.chain, now, resumed=True)
        group.stored = stored
        group.blocked = True
        group.move(SequenceEvent.PREEMPT if stored is None else SequenceEvent.SWAP)
        self._group_of[sequence.id] = group
        self.waiting.add(group)
        return group

    def restore(self, group: SequenceGroup) -> Sequence:
        """A sequence whose KV swap memory kept has blocks again and runs on."""
        self.waiting.remove(group)
        (sequence,) = group.sequences
        group.split(self._pool, computed=len(group.tokens) - 1)
        sequence.move(SequenceEvent.RESTORE)
        del self._group_of[sequence.id]
        self.running[sequence.id] = sequence
        return sequence

    def hold(self, sequence: Sequence) -> None:
        """A running sequence stops; what is launched still counts. Its blocks stay till its end."""
        sequence.move(SequenceEvent.HOLD)
        del self.running[sequence.id]
        self.held[sequence.key] = sequence

    def resume(self, sequence: Sequence, attempt: Attempt | None) -> None:
        """A held sequence runs on. attempt: as this one from now on."""
        del self.held[sequence.key]
        if attempt is not None:
            self.rename(sequence, attempt)
        sequence.move(SequenceEvent.RESUME)
        self.running[sequence.id] = sequence

    def rename(
        self, sequence: Sequence, attempt: Attempt, earlier: Iterable[Logprobs] = ()
    ) -> None:
        """A sequence that stands alone, and is not held, is this attempt from now on. earlier: see
        `Sequence.rename`."""
        self._drop_key(sequence)
        sequence.rename(attempt, tuple(earlier))
        self._attempts[attempt.key] = {sequence.key.choice: sequence}
        group = self._group_of.get(sequence.id)
        if group is not None:
            group.key = attempt.key

    def drop_stored(self, group: SequenceGroup) -> None:
        """The KV of a waiting group is not kept after all: it has to be computed again."""
        self.waiting.remove(group)
        self._release_stored(group)
        group.move(SequenceEvent.PREEMPT)
        self.waiting.add(group)

    def end(self, sequence: Sequence, event: SequenceEvent) -> None:
        """The one place where a sequence leaves."""
        waits = sequence.state in (SequenceState.QUEUED, SequenceState.SWAPPED)
        sequence.move(event)
        self.running.pop(sequence.id, None)
        self.held.pop(sequence.key, None)
        group = self._group_of.pop(sequence.id, None)
        if group is not None:
            if waits:
                self.waiting.num_sequences -= 1
            group.sequences.remove(sequence)
            if not group.sequences:
                self._remove(group, waits)
        sequence.release_table(self._pool)
        self._drop_key(sequence)
        self._forget(sequence.id)

    def check(self) -> None:
        """Raises InvariantBroken unless all that is owned belongs to a sequence here."""
        self._pool.check()
        self.swap.check()
        groups = (
            *self.waiting, *self.prefilling, *self.arriving.values(), *self.kept.values()
        )  # fmt: skip
        alone = len(self.running) + len(self.held)
        tables = sum(group.num_tables for group in groups) + alone + len(self.prefixes)
        if tables != self._pool.num_tables:
            raise InvariantBroken(f"{self._pool.num_tables} tables are owned, {tables} in use")
        grants = sum(group.stored is not None for group in groups)
        if grants != self.swap.num_grants:
            raise InvariantBroken(f"{self.swap.num_grants} swap grants are owned, {grants} in use")
        if sum(len(group.sequences) for group in self.waiting) != self.waiting.num_sequences:
            raise InvariantBroken("waiting sequences are miscounted")
        here = alone + sum(len(group.sequences) for group in groups)
        if here != sum(len(choices) for choices in self._attempts.values()):
            raise InvariantBroken("a sequence is in no place, or in two")

    def _enter(self, group: SequenceGroup) -> None:
        self._attempts[group.key] = {s.key.choice: s for s in group.sequences}
        for sequence in group.sequences:
            self._group_of[sequence.id] = group

    def _drop_key(self, sequence: Sequence) -> None:
        key = sequence.attempt.key
        del self._attempts[key][sequence.key.choice]
        if not self._attempts[key]:
            del self._attempts[key]

    def _remove(self, group: SequenceGroup, waits: bool) -> None:
        """Drops a group whose sequences have all ended."""
        group.release_table(self._pool)
        if waits:
            self.waiting.remove(group)
            self._release_stored(group)
        elif group in self.prefilling:
            self.prefilling.remove(group)
        elif self.kept.pop(group.key, None) is None:
            del self.arriving[group.key]

    def _release_stored(self, group: SequenceGroup) -> None:
        stored, group.stored = group.stored, None
        if stored is not None:
            self.swap.release(stored)
