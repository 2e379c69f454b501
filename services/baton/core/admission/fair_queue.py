"""FairQueue, requests that were admitted and have no place yet.

Who goes first: priority class; then deficit round robin over tenants, by tokens and weights; then,
within a tenant, deadline and arrival. It is bounded by tokens and by entries, and so that no tenant
can fill it: what one tenant has waiting must not exceed what is still free (dynamic thresholds with
factor 1: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998). One tenant alone gets half of the queue, two get a third each, and there is always room for
another one.

Entries that go on with something that a client has seen already do not count against the bounds,
and come before all others: they are paced, never refused.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.core.scheduler.deficits import Deficits

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One that waits."""

    item: T
    tenant: str
    weight: float
    """The tenant's share, relative to others'."""
    priority: int
    """Smaller is more urgent."""
    tokens: int
    """What it may come to cost: prompt and longest output."""
    arrived: float
    """On the queue's clock, in seconds."""
    deadline: float = math.inf
    """On the same clock."""
    resumed: bool = False
    """It goes on with something that a client has seen already."""
    number: int = field(default=0, init=False)
    """In the order of arrival."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Within its tenant."""
        return self.deadline, self.arrived, self.number

    @property
    def class_(self) -> tuple[bool, int]:
        """Smaller goes first."""
        return not self.resumed, self.priority


class _Class(Generic[T]):
    """The entries of one priority class."""

    def __init__(self, quantum: float) -> None:
        self.deficits = Deficits(quantum)
        self.entries: dict[str, list[Entry[T]]] = {}
        self.tokens: dict[str, int] = {}
        """By tenant, as `entries`."""


class FairQueue(Generic[T]):
    """max_tokens, max_entries: of all that are not resumed. quantum: tokens a tenant of weight 1 is
    served before it is another one's turn.
    """

    def __init__(self, *, max_tokens: int, max_entries: int, quantum: float = 64.0) -> None:
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self._quantum = quantum
        self._classes: dict[tuple[bool, int], _Class[T]] = {}
        self._next_number = 0
        self._num_entries = 0
        self.tokens = 0
        """Of all entries that count against the bounds."""
        self.num_bounded = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry[T]]:
        """By class; within a class in no order that means anything."""
        for key in sorted(self._classes):
            for entries in self._classes[key].entries.values():
                yield from entries

    def __contains__(self, entry: Entry[T]) -> bool:
        class_ = self._classes.get(entry.class_)
        return class_ is not None and entry in class_.entries.get(entry.tenant, ())

    def has_room(self, tenant: str, tokens: int) -> bool:
        """Whether one more of a tenant, that is not resumed, is within the bounds."""
        own_entries = own_tokens = 0
        for key, class_ in self._classes.items():
            if key[0]:
                own_entries += len(class_.entries.get(tenant, ()))
                own_tokens += class_.tokens.get(tenant, 0)
        free_entries = self._max_entries - self.num_bounded
        free_tokens = self._max_tokens - self.tokens
        if free_entries < 1 or own_entries >= free_entries:
            return False
        # One alone is let in whatever its length, or it could never be.
        return not self.num_bounded or own_tokens + tokens <= free_tokens

    def add(self, entry: Entry[T]) -> None:
        """Whether there is room is the caller's to ask, with `has_room`."""
        entry.number, self._next_number = self._next_number, self._next_number + 1
        class_ = self._classes.setdefault(entry.class_, _Class(self._quantum))
        class_.deficits.join(entry.tenant, entry.weight)
        insort(class_.entries.setdefault(entry.tenant, []), entry, key=lambda e: e.rank)
        class_.tokens[entry.tenant] = class_.tokens.get(entry.tenant, 0) + entry.tokens
        self._count(entry, 1)

    def remove(self, entry: Entry[T], *, served: bool) -> None:
        """served: its tenant pays for it. Raises ValueError for one that does not wait."""
        if entry not in self:
            raise ValueError("this entry does not wait here")
        class_ = self._classes[entry.class_]
        entries = class_.entries[entry.tenant]
        entries.remove(entry)
        class_.tokens[entry.tenant] -= entry.tokens
        self._count(entry, -1)
        if served:
            class_.deficits.charge(entry.tenant, entry.tokens)
        if not entries:
            del class_.entries[entry.tenant], class_.tokens[entry.tenant]
            class_.deficits.leave(entry.tenant)
        if not class_.entries:
            del self._classes[entry.class_]

    def heads(self) -> list[Entry[T]]:
        """Every tenant's first entry of every class, who is next first."""
        return [
            class_.entries[tenant][0]
            for _, class_ in sorted(self._classes.items(), key=lambda item: item[0])
            for tenant in class_.deficits.order()
        ]

    def settle(self, tenant: str, priority: int, unused: int) -> None:
        """One that was served used so many tokens less than it was charged, or more."""
        class_ = self._classes.get((True, priority))
        if class_ is None:
            return
        if unused >= 0:
            class_.deficits.give_back(tenant, unused)
        else:
            class_.deficits.charge(tenant, -unused)

    def ahead(self, tenant: str, weight: float, priority: int) -> float:
        """Tokens that would be served before a new entry of a tenant, about: all of better
        classes, the tenant's own, and of each other tenant as much as its weight lets it have
        meanwhile."""
        class_ = self._classes.get((True, priority))
        own = 0 if class_ is None else class_.tokens.get(tenant, 0)
        return self._ahead((True, priority), tenant, weight, own)

    def hopeless(
        self, wait_s: Callable[[float], float], latest: Callable[[Entry[T]], float], now: float
    ) -> list[Entry[T]]:
        """Entries that will not be served by their latest time, if none of them is served.

        wait_s: how long serving so many tokens takes.
        """
        found = []
        for key, class_ in self._classes.items():
            if not key[0]:
                continue
            for tenant, entries in class_.entries.items():
                own = 0
                for entry in entries:
                    ahead = self._ahead(key, tenant, entry.weight, own)
                    if now + wait_s(ahead) > latest(entry):
                        found.append(entry)
                    else:
                        own += entry.tokens
        return found

    def _ahead(self, key: tuple[bool, int], tenant: str, weight: float, own: float) -> float:
        """own: what of the tenant's own class goes before it."""
        total = own + sum(sum(c.tokens.values()) for k, c in self._classes.items() if k < key)
        class_ = self._classes.get(key)
        if class_ is None:
            return total
        for other, tokens in class_.tokens.items():
            if other != tenant:
                share = class_.entries[other][0].weight / weight
                total += min(tokens, (own + self._quantum * weight) * share)
        return total

    def _count(self, entry: Entry[T], one: int) -> None:
        self._num_entries += one
        if not entry.resumed:
            self.num_bounded += one
            self.tokens += one * entry.tokens


FORGET_S = 5.0
"""After so much time with a queue a sighting weighs 1/e."""

ENOUGH_S = 0.25
"""With less than this seen, nothing is said."""

DOUBT = 2.0
"""A predicted wait may turn out so many times shorter: entries leave in batches, and what one of
them comes to is a guess."""


class DrainRate:
    """How fast a queue is emptied, as it was observed. Times are readings of one clock, in seconds.

    Only time in which somebody waited counts, and only entries that had to wait: an idle fleet
    takes a burst at once, which is no sign of how fast it works. Older observations are forgotten
    exponentially.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._next = 0.0
        self._since: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known. One that is about to leave counts as if it did now: that nobody has left
        for a while says how long it takes at least, and not that it takes for ever."""
        if self._busy_s < ENOUGH_S:
            return None
        return (self._tokens + self._next) / self._busy_s

    def wait_s(self, tokens: float) -> float:
        """How long until so many tokens have left. 0.0 while nothing is known."""
        rate = self.tokens_per_s
        if rate is None or tokens <= 0:
            return 0.0
        return tokens / rate if rate > 0 else math.inf

    def least_wait_s(self, tokens: float) -> float:
        """How long at least, as far as so few sightings can tell."""
        return self.wait_s(tokens) / DOUBT

    def waiting(self, now: float, next_tokens: float | None) -> None:
        """Whether anybody waits, from now on, and what the next one comes to, about; None: nobody
        waits."""
        if self._since is not None and now > self._since:
            passed = now - self._since
            keep = math.exp(-passed / FORGET_S)
            self._tokens *= keep
            self._busy_s = self._busy_s * keep + passed
        self._since = None if next_tokens is None else now
        if next_tokens is not None:
            self._next = next_tokens

    def left(self, tokens: float, now: float) -> None:
        """One that had to wait goes on."""
        self.waiting(now, self._next)
        self._tokens += tokens
