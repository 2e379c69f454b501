"""Roster, who is on a decode worker and where in its life; knows no budgets and decides nothing.

Every sequence is in exactly one place, and its state says which: `waiting` (QUEUED), `prefilling`,
`arriving`, or `running` (RUNNING and PAUSED). The first three hold inputs, shared by sequences
until their KV is complete. Whoever leaves goes through `end`, which gives its blocks back.
"""

from __future__ import annotations

from baton.core.attempt import AttemptKey, SequenceKey
from baton.core.block_pool import BlockPool, InvariantBroken
from baton.core.scheduling import Load
from baton.core.sequence import Sequence, SequenceEvent
from baton.core.shared_input import SharedInput


class Roster:
    """running is by sequence id, in order of joining; arriving by attempt."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self.waiting: list[SharedInput] = []
        self.prefilling: list[SharedInput] = []
        self.arriving: dict[AttemptKey, SharedInput] = {}
        self.running: dict[int, Sequence] = {}
        self._attempts: dict[AttemptKey, dict[int, Sequence]] = {}
        self._input_of: dict[int, SharedInput] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._attempts

    def __len__(self) -> int:
        """Attempts with a sequence that has not ended."""
        return len(self._attempts)

    @property
    def num_owning(self) -> int:
        """Sequences that own blocks."""
        inputs = (*self.prefilling, *self.arriving.values())
        return len(self.running) + sum(len(shared.sequences) for shared in inputs)

    @property
    def load(self) -> Load:
        uncomputed = (*self.waiting, *self.prefilling)
        return Load(
            waiting_sequences=sum(len(shared.sequences) for shared in self.waiting),
            waiting_tokens=sum(shared.remaining for shared in uncomputed),
            running_sequences=self.num_owning,
            free_blocks=self._pool.num_free,
        )

    def choices(self, key: AttemptKey) -> dict[int, Sequence]:
        """An attempt's sequences that have not ended, by choice."""
        return dict(self._attempts.get(key, {}))

    def find(self, key: SequenceKey) -> Sequence | None:
        return self._attempts.get(AttemptKey(key.request_id, key.attempt), {}).get(key.choice)

    def wait(self, shared: SharedInput) -> None:
        """An attempt enters, to be computed here."""
        self._enter(shared)
        self.waiting.append(shared)

    def expect(self, shared: SharedInput) -> None:
        """An attempt enters; it owns blocks and its KV comes from elsewhere."""
        self._enter(shared)
        shared.move(SequenceEvent.RESERVE)
        self.arriving[shared.key] = shared

    def start(self, shared: SharedInput) -> None:
        """A waiting input got its blocks."""
        self.waiting.remove(shared)
        shared.move(SequenceEvent.START)
        self.prefilling.append(shared)

    def part(self, shared: SharedInput) -> None:
        """An input's KV is complete: its sequences run, each on its own."""
        if shared in self.prefilling:
            self.prefilling.remove(shared)
        else:
            del self.arriving[shared.key]
        shared.publish(self._pool)
        shared.hand_on(self._pool)
        shared.move(SequenceEvent.READY)
        for sequence in shared.sequences:
            del self._input_of[sequence.id]
            self.running[sequence.id] = sequence

    def push_back(self, victim: Sequence | SharedInput, now: float) -> None:
        """Takes the blocks of a running sequence or an input being computed; it waits again."""
        if isinstance(victim, SharedInput):
            shared = victim
            self.prefilling.remove(shared)
            shared.give_up_blocks(self._pool)
        else:
            del self.running[victim.id]
            victim.give_up_table(self._pool)
            assert victim.chain is not None
            shared = SharedInput([victim], victim.chain, now, resumed=True)
            self._input_of[victim.id] = shared
        shared.move(SequenceEvent.PREEMPT)
        shared.held_back = True
        self.waiting.append(shared)

    def end(self, sequence: Sequence, event: SequenceEvent) -> None:
        """The one place where a sequence leaves."""
        sequence.move(event)
        self.running.pop(sequence.id, None)
        shared = self._input_of.pop(sequence.id, None)
        if shared is not None:
            shared.sequences.remove(sequence)
            if not shared.sequences:
                self._forget(shared)
        sequence.give_up_table(self._pool)
        key = sequence.attempt.key
        del self._attempts[key][sequence.key.choice]
        if not self._attempts[key]:
            del self._attempts[key]

    def check(self) -> None:
        """Raises InvariantBroken unless every block table belongs to someone here."""
        self._pool.check()
        inputs = (*self.waiting, *self.prefilling, *self.arriving.values())
        tables = sum(shared.num_tables for shared in inputs) + len(self.running)
        if tables != self._pool.num_tables:
            raise InvariantBroken(f"{self._pool.num_tables} tables are owned, {tables} in use")
        here = len(self.running) + sum(len(shared.sequences) for shared in inputs)
        if here != sum(len(choices) for choices in self._attempts.values()):
            raise InvariantBroken("a sequence is in no place, or in two")

    def _enter(self, shared: SharedInput) -> None:
        self._attempts[shared.key] = {s.key.choice: s for s in shared.sequences}
        for sequence in shared.sequences:
            self._input_of[sequence.id] = shared

    def _forget(self, shared: SharedInput) -> None:
        """Drops an input that no sequence needs any more."""
        shared.give_up_table(self._pool)
        for place in (self.waiting, self.prefilling):
            if shared in place:
                place.remove(shared)
        self.arriving.pop(shared.key, None)
