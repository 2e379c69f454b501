"""FairQueue: admitted requests that are not placed yet.

The order is by priority class; then deficit round robin over tenants, by tokens and weights; then,
within a tenant, by deadline and arrival. Entries that others serve (another model's workers) may
pass those that cannot be served now.

The queue is bounded by tokens and by entries, so that no tenant can fill it: what one tenant has
waiting must not exceed what is still free (dynamic thresholds with factor 1: Choudhury and Hahne,
"Dynamic queue length thresholds for shared-memory packet switches", 1998). One tenant alone gets
half of the queue, two get a third each, and there is always room for another one.

Entries that resume an answer which the client has begun to read do not count against the bounds and
precede all others: they are paced, never refused.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batonlm.core.scheduler.deficits import Deficits

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """A waiting entry."""

    item: T
    tenant: str
    weight: float
    """The tenant's share relative to others."""
    priority: int
    """Smaller is more urgent."""
    tokens: int
    """The expected cost: prompt and longest output."""
    arrived: float
    """On the queue's clock, in seconds."""
    deadline: float = math.inf
    """On the queue's clock, in seconds."""
    resumed: bool = False
    """Whether it resumes an answer that the client has begun to read."""
    group: str = ""
    """What serves it. Entries of a group that is busy hold up none of another."""
    number: int = field(default=0, init=False)
    """In the order of arrival."""

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sorts the entries of one tenant."""
        return self.deadline, self.arrived, self.number

    @property
    def class_(self) -> tuple[bool, int]:
        """The key of the class; smaller is served first."""
        return not self.resumed, self.priority


class _Class(Generic[T]):
    """The entries of one priority class."""

    def __init__(self, quantum: float) -> None:
        self.deficits = Deficits(quantum)
        self.entries: dict[str, list[Entry[T]]] = {}
        self.tokens: dict[str, int] = {}
        """By tenant, as `entries`."""


class FairQueue(Generic[T]):
    """A bounded queue of entries in fair order."""

    def __init__(self, *, max_tokens: int, max_entries: int, quantum: float = 64.0) -> None:
        """max_tokens, max_entries: bounds on all entries that are not resumed. quantum: tokens that
        a tenant of weight 1 is served before the next tenant's turn."""
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self._quantum = quantum
        self.classes: dict[tuple[bool, int], _Class[T]] = {}
        """Only those that have entries."""
        self._next_number = 0
        self._num_entries = 0
        self._groups = Counter[str]()
        self.tokens = 0
        """Tokens of all entries that count against the bounds."""
        self.num_bounded = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry[T]]:
        """Iterates by class; the order within a class is unspecified."""
        for key in sorted(self.classes):
            for entries in self.classes[key].entries.values():
                yield from entries

    def __contains__(self, entry: Entry[T]) -> bool:
        class_ = self.classes.get(entry.class_)
        return class_ is not None and entry in class_.entries.get(entry.tenant, ())

    def has_room(self, tenant: str, tokens: int) -> bool:
        """Whether one more entry of the tenant, not resumed, is within the bounds."""
        own_entries = own_tokens = 0
        for key, class_ in self.classes.items():
            if key[0]:
                own_entries += len(class_.entries.get(tenant, ()))
                own_tokens += class_.tokens.get(tenant, 0)
        free_entries = self._max_entries - self.num_bounded
        free_tokens = self._max_tokens - self.tokens
        if free_entries < 1 or own_entries >= free_entries:
            return False
        # A single entry is admitted whatever its length; otherwise it could never run.
        return not self.num_bounded or own_tokens + tokens <= free_tokens

    def add(self, entry: Entry[T]) -> None:
        """Adds an entry. The caller checks `has_room` first."""
        entry.number, self._next_number = self._next_number, self._next_number + 1
        class_ = self.classes.setdefault(entry.class_, _Class(self._quantum))
        class_.deficits.join(entry.tenant, entry.weight)
        insort(class_.entries.setdefault(entry.tenant, []), entry, key=lambda e: e.rank)
        class_.tokens[entry.tenant] = class_.tokens.get(entry.tenant, 0) + entry.tokens
        self._count(entry, 1)

    def remove(self, entry: Entry[T], *, served: bool) -> None:
        """Removes an entry. served: charges its tenant. Raises ValueError for an entry that is not
        queued."""
        if entry not in self:
            raise ValueError("this entry does not wait here")
        class_ = self.classes[entry.class_]
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
            del self.classes[entry.class_]

    def heads(self) -> list[Entry[T]]:
        """Returns the first entry of each group of every tenant in every class, in the order of
        service."""
        return [
            head
            for _, class_ in sorted(self.classes.items(), key=lambda item: item[0])
            for tenant in class_.deficits.order()
            for head in self._first_of_groups(class_.entries[tenant])
        ]

    def has_idle(self, groups: Collection[str]) -> bool:
        """Whether nothing waits for one of these groups, or nothing at all."""
        return not self._num_entries or any(group not in self._groups for group in groups)

    def settle(self, tenant: str, priority: int, unused: int) -> None:
        """Corrects the charge of a served entry, which used this many tokens fewer (negative:
        more)."""
        class_ = self.classes.get((True, priority))
        if class_ is None:
            return
        if unused >= 0:
            class_.deficits.give_back(tenant, unused)
        else:
            class_.deficits.charge(tenant, -unused)

    def ahead(self, tenant: str, weight: float, priority: int) -> float:
        """Estimates the tokens that would be served before a new entry of the tenant: all better
        classes, the tenant's own entries, and what the weights of the other tenants let them have
        meanwhile."""
        class_ = self.classes.get((True, priority))
        own = 0 if class_ is None else class_.tokens.get(tenant, 0)
        return self._ahead((True, priority), tenant, weight, own)

    def hopeless(
        self, wait_s: Callable[[float], float], latest: Callable[[Entry[T]], float], now: float
    ) -> list[Entry[T]]:
        """Returns entries that would be served too late even if none of them were served.

        wait_s: returns the seconds that serving this many tokens takes. latest: returns the latest
        time of an entry.
        """
        found = []
        for key, class_ in self.classes.items():
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
        """own: tokens of the tenant's own class that precede the entry."""
        total = own + sum(sum(c.tokens.values()) for k, c in self.classes.items() if k < key)
        class_ = self.classes.get(key)
        if class_ is None:
            return total
        for other, tokens in class_.tokens.items():
            if other != tenant:
                share = class_.entries[other][0].weight / weight
                total += min(tokens, (own + self._quantum * weight) * share)
        return total

    def _first_of_groups(self, entries: list[Entry[T]]) -> Collection[Entry[T]]:
        if len(self._groups) == 1:
            return entries[:1]
        found: dict[str, Entry[T]] = {}
        for entry in entries:
            found.setdefault(entry.group, entry)
            if len(found) == len(self._groups):
                break
        return found.values()

    def _count(self, entry: Entry[T], one: int) -> None:
        self._num_entries += one
        self._groups[entry.group] += one
        if not self._groups[entry.group]:
            del self._groups[entry.group]
        if not entry.resumed:
            self.num_bounded += one
            self.tokens += one * entry.tokens


FORGET_S = 5.0
"""An observation weighs 1/e after this many seconds with a queue."""

ENOUGH_S = 0.25
"""Least seconds of observation before a rate is given."""

DOUBT = 2.0
"""A predicted wait may turn out shorter by up to this factor: entries leave in batches, and the
cost of each is an estimate."""


class DrainRate:
    """The observed rate at which a queue drains. Times are readings of one clock, in seconds.

    Only time with a waiting entry counts, and only entries that had to wait: an idle fleet takes a
    burst at once, which does not show its speed. Older observations decay exponentially.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._next = 0.0
        self._since: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: unknown. The next entry to leave counts as leaving now, so that a period without
        departures gives a lower bound on the wait instead of an infinite one."""
        if self._busy_s < ENOUGH_S:
            return None
        return (self._tokens + self._next) / self._busy_s

    def wait_s(self, tokens: float) -> float:
        """Returns seconds until this many tokens have left; 0.0 while the rate is unknown."""
        rate = self.tokens_per_s
        if rate is None or tokens <= 0:
            return 0.0
        return tokens / rate if rate > 0 else math.inf

    def least_wait_s(self, tokens: float) -> float:
        """Returns a lower bound of `wait_s`, given the uncertainty of few observations."""
        return self.wait_s(tokens) / DOUBT

    def waiting(self, now: float, next_tokens: float | None) -> None:
        """Reports whether anything waits from now on. next_tokens: the approximate cost of the next
        entry; None: the queue is empty."""
        if self._since is not None and now > self._since:
            passed = now - self._since
            keep = math.exp(-passed / FORGET_S)
            self._tokens *= keep
            self._busy_s = self._busy_s * keep + passed
        self._since = None if next_tokens is None else now
        if next_tokens is not None:
            self._next = next_tokens

    def left(self, tokens: float, now: float) -> None:
        """An entry that had to wait has left."""
        self.waiting(now, self._next)
        self._tokens += tokens
