"""Waiting, the inputs that have no blocks yet, most important first; decides nothing.

It counts as it goes, so that a long queue costs a step nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from baton.core.scheduler.sequence_group import SequenceGroup


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
