"""Which requests may be what kills workers, and how they are kept apart.

A request that had gained no token in an attempt whose worker died (or hung) is a suspect: it may
have done it. Suspects run at most one per worker at a time, so that the next death tells who it
was. Two deaths with a lone suspect end it. One that gains a token in a later attempt is cleared,
whatever it shared a batch with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_LONE_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """Of one request. lone_deaths: of workers on which it was the only suspect."""

    suspect: bool = False
    lone_deaths: int = 0

    @property
    def guilty(self) -> bool:
        return self.lone_deaths >= MAX_LONE_DEATHS

    def died(self, *, alone: bool) -> None:
        """A worker died with the request on it, before it had gained a token there. alone: as the
        only suspect."""
        self.suspect = True
        self.lone_deaths += alone

    def cleared(self) -> None:
        """It gained a token."""
        self.suspect = False
        self.lone_deaths = 0


class Quarantine:
    """Where the suspects of one router run, by instance id."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    def taken(self) -> frozenset[str]:
        """Workers that have a suspect."""
        return frozenset(self._taken)

    @contextmanager
    def entered(self, instance_ids: Collection[str]) -> Iterator[None]:
        """A suspect is on these workers while the context is open; none was."""
        assert self._taken.isdisjoint(instance_ids), "two suspects on one worker"
        self._taken.update(instance_ids)
        try:
            yield
        finally:
            self._taken.difference_update(instance_ids)
