"""SchedulerPolicy, how much a worker takes on and in which order; how tenants take turns.

In: options of a worker. Out: limits of a step and of the queue, groups in the order of service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from batonlm.core.errors import Overloaded
from batonlm.core.request.attempt import Attempt
from batonlm.core.scheduler.deficits import Deficits
from batonlm.core.scheduler.sequence import SequenceGroup
from batonlm.core.scheduler.sequence_table import Load

SPECULATION = "off", "ngram", "draft", "heads"
"""Where drafts may come from: from the text before, or from there and from a small model, or the
model's own head."""

RETRY_S = 0.05
"""About a step, and as often as a worker reports its load."""


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """How much may wait. As long as fewer tokens than these wait, an input of any length is
    accepted: the queue must not run dry while a long one waits for the whole of it to be free.
    """

    tokens: int = 16384
    sequences: int = 1024

    def check(self, load: Load, attempt: Attempt) -> None:
        """Raises Overloaded when an attempt does not fit any more. The router tries again as soon
        as the worker reports that less waits."""
        full = load.waiting_tokens >= self.tokens
        if full or load.waiting_sequences + len(attempt.choices) > self.sequences:
            raise Overloaded(
                f"The worker's queue is full: {load.waiting_sequences} sequences with "
                f"{load.waiting_tokens} tokens wait.",
                retry_after_s=RETRY_S,
            )


Order = Callable[[Iterable[SequenceGroup], float], list[SequenceGroup]]
"""Which group of one tenant is computed first, at a time; priority classes stay in order."""


_RANK = attrgetter("priority", "id")
"""As `rank`, without a call for each group: a long queue is put in order at every step."""


def first_come(groups: Iterable[SequenceGroup], now: float) -> list[SequenceGroup]:
    """Priority class, then arrival."""
    return sorted(groups, key=_RANK)


def shortest_remaining(aging_tokens_per_s: float) -> Order:
    """Priority class, then fewest positions left, where each second of waiting counts as so many
    positions less. No group starves: what arrives now comes behind all that waited long enough."""

    def order(groups: Iterable[SequenceGroup], now: float) -> list[SequenceGroup]:
        def key(group: SequenceGroup) -> tuple[int, float, int]:
            waited = (now - group.arrived) * aging_tokens_per_s
            return group.priority, group.remaining - waited, group.id

        return sorted(groups, key=key)

    return order


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Limits and order of one scheduler. The defaults are a decode worker's; `PREFILL` has a
    prefill worker's, for which max_sequences to target_step_s mean nothing."""

    max_sequences: int = 256
    """Sequences that own blocks at once."""
    token_budget: int = 2048
    """Positions of a step at most, one of them for each running sequence."""
    prefill_budget: int = 256
    """Most of them for prefill while sequences run."""
    headroom: int = 64
    """Positions by which all that is admitted can grow."""
    target_step_s: float = 0.0
    """The strictest time between two tokens, in seconds: nothing is admitted, and no chunk is
    longer, than lets a step's predicted time stay below it, but one sequence always runs and one
    block is always computed; 0: no limit."""
    limit: QueueLimit = field(default_factory=QueueLimit)
    """What may wait to be computed."""
    first_token_only: bool = False
    """A prefill worker's: sequences stop after their first token, and their KV is kept until it is
    released."""
    order: Order = first_come
    """Within a priority class and a tenant."""
    quantum: int = 0
    """Positions that a tenant is served before it is another one's turn, times its weight; 0:
    tenants do not take turns."""
    batch_window_s: float = 0.0
    """How long an input waits for others to fill a step with, when nothing is being computed and
    another one came lately."""
    speculation: str = "off"
    """Where drafts come from, one of SPECULATION."""
    starving_after_s: float = 0.0
    """A group that found no room for so long lets none behind it start."""

    def prefill_beside(self, block_size: int) -> int:
        """Positions that a step may prefill beside sequences that run. Raises ValueError when that
        is less than a block."""
        if self.first_token_only:
            if self.token_budget < block_size:
                raise ValueError("token_budget must be at least one block, or nothing can run")
            return self.token_budget
        beside = min(self.prefill_budget, self.token_budget - self.max_sequences)
        if beside < block_size:
            raise ValueError(
                "prefill_budget, and token_budget - max_sequences, must be at least one block, "
                "or local prefill can starve"
            )
        return beside


PREFILL = SchedulerPolicy(
    first_token_only=True,
    order=shortest_remaining(aging_tokens_per_s=1000.0),
    quantum=512,
    batch_window_s=0.002,
    starving_after_s=2.0,
)
"""A prefill worker's policy."""


class TenantTurns:
    """Which tenant's group is computed next. Within a priority class tenants take turns by deficit
    round robin over computed tokens (`Deficits`); within a tenant the given order stays."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._classes: dict[int, Deficits] = {}

    def order(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """All of them, sorted by priority class before, so that tenants take turns."""
        found: list[SequenceGroup] = []
        present = set()
        for priority, equals in groupby(groups, key=lambda group: group.priority):
            present.add(priority)
            deficits = self._classes.setdefault(priority, Deficits(self._quantum))
            found += _interleaved(deficits, list(equals))
        for gone in self._classes.keys() - present:
            del self._classes[gone]
        return found

    def served(self, group: SequenceGroup, tokens: int) -> None:
        """So many positions of a group are computed."""
        self._classes[group.priority].charge(group.tenant, tokens)


def _interleaved(deficits: Deficits, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    """In the order in which they would be served if there was nothing else to wait for."""
    of: dict[str, list[SequenceGroup]] = {}
    for group in groups:
        of.setdefault(group.tenant, []).append(group)
    for tenant in deficits.members() - of.keys():
        deficits.leave(tenant)
    for tenant, own in of.items():
        deficits.join(tenant, own[0].weight)
    if len(of) == 1:
        return list(groups)
    found: list[SequenceGroup] = []
    trial = deficits.copy()
    while len(found) < len(groups):
        tenant = trial.order()[0]
        group = of[tenant].pop(0)
        trial.charge(tenant, group.remaining)
        found.append(group)
        if not of[tenant]:
            trial.leave(tenant)
    return found
