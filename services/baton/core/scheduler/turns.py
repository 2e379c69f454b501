"""Turns, which tenant's input a worker computes next; knows no blocks and no steps.

Within a priority class tenants take turns by deficit round robin over computed tokens (`Deficits`);
within a tenant the given order stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from baton.core.scheduler.deficits import Deficits
from baton.core.scheduler.sequence_group import SequenceGroup


class Turns:
    """quantum: tokens that a tenant of weight 1 is served before it is another one's turn."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._classes: dict[int, Deficits] = {}

    def order(self, inputs: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """All of them, sorted by priority class before, so that tenants take turns."""
        found: list[SequenceGroup] = []
        present = set()
        for priority, group in groupby(inputs, key=lambda shared: shared.priority):
            present.add(priority)
            deficits = self._classes.setdefault(priority, Deficits(self._quantum))
            found += _interleaved(deficits, list(group))
        for gone in self._classes.keys() - present:
            del self._classes[gone]
        return found

    def served(self, shared: SequenceGroup, tokens: int) -> None:
        """So many positions of an input are computed."""
        self._classes[shared.priority].charge(shared.tenant, tokens)


def _interleaved(deficits: Deficits, inputs: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    """In the order in which they would be served if there was nothing else to wait for."""
    of: dict[str, list[SequenceGroup]] = {}
    for shared in inputs:
        of.setdefault(shared.tenant, []).append(shared)
    for tenant in deficits.members() - of.keys():
        deficits.leave(tenant)
    for tenant, own in of.items():
        deficits.join(tenant, own[0].weight)
    if len(of) == 1:
        return list(inputs)
    found: list[SequenceGroup] = []
    trial = deficits.copy()
    while len(found) < len(inputs):
        tenant = trial.order()[0]
        shared = of[tenant].pop(0)
        trial.charge(tenant, shared.remaining)
        found.append(shared)
        if not of[tenant]:
            trial.leave(tenant)
    return found
