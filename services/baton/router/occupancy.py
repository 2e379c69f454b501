"""Occupancy, which workers are full, as far as one router can know; decides nothing.

A worker's report is a little old and tells of all routers' work. What this router has given to a
worker it knows exactly; what others have there is taken from the newest report, less what was this
router's when it came. So room that comes free here is used at once, not when the worker says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.load import WorkerLoad
from baton.router.fleet import Fleet
from baton.router.worker import Worker

if TYPE_CHECKING:
    from baton.router.placement import Place

BATCHES = 2
"""What may wait at a worker, in steps' worth of prompt tokens: one more would only wait there
instead of here, where it is still in order."""

REFRESH_S = 0.005


@dataclass(slots=True)
class _Books:
    """Of one worker. computing: prompt tokens this router gave it to compute, without an answer.
    kv: positions this router promised it, without a word that their KV is there. others_*: what
    other routers have there. load: the report that this is from.
    """

    computing: int = 0
    kv: int = 0
    others_waiting: int = 0
    others_sequences: int = 0
    load: WorkerLoad | None = None

    @property
    def is_empty(self) -> bool:
        return not self.computing and not self.kv


class Occupancy:
    """full: incarnations of workers that should get nothing more now."""

    def __init__(self, fleet: Fleet) -> None:
        self.full: set[str] = set()
        self._fleet = fleet
        self._books: dict[str, _Books] = {}
        self._refreshed_at = float("-inf")

    def refresh(self, now: float) -> None:
        """Takes the newest reports, if that was not done a moment ago."""
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        live: set[str] = set()
        for pool in (self._fleet.prefills, self._fleet.decodes):
            for worker in pool.workers():
                live.add(worker.identity.incarnation)
                self.update(worker)
        self.full &= live
        for gone in [i for i, b in self._books.items() if i not in live and b.is_empty]:
            del self._books[gone]

    def update(self, worker: Worker[Any]) -> None:
        """What the worker has may have changed."""
        if self._is_full(worker, self._read(worker)):
            self.full.add(worker.identity.incarnation)
        else:
            self.full.discard(worker.identity.incarnation)

    def take(self, place: Place, input_tokens: int, choices: int) -> Callable[[], None]:
        """The workers get an attempt's input. Returns what undoes it."""
        computes = place.prefill or place.decode
        assert computes is not None
        computing = self._book(computes.identity.incarnation)
        holding = None if place.decode is None else self._book(place.decode.identity.incarnation)
        computing.computing += input_tokens
        if holding is not None:
            holding.kv += input_tokens + choices

        def undo() -> None:
            computing.computing -= input_tokens
            if holding is not None:
                holding.kv -= input_tokens + choices

        return undo

    def has_kv(self, worker: Worker[Any], positions: int) -> bool:
        """Whether a decode worker has free blocks for so many more. One that runs nothing takes
        whatever it can take at all."""
        books, load = self._book(worker.identity.incarnation), worker.load
        if load is None or (not worker.placed_sequences and not load.running_sequences):
            return True
        free = load.free_blocks * max(1, worker.description.block_size)
        return positions <= free - books.kv

    def _book(self, incarnation: str) -> _Books:
        return self._books.setdefault(incarnation, _Books())

    def _read(self, worker: Worker[Any]) -> _Books:
        books, load = self._book(worker.identity.incarnation), worker.load
        if load is not None and load is not books.load:
            books.load = load
            books.others_waiting = max(0, load.waiting_tokens - books.computing)
            here = load.waiting_sequences + load.running_sequences
            books.others_sequences = max(0, here - worker.placed_sequences)
        return books

    def _is_full(self, worker: Worker[Any], books: _Books) -> bool:
        load = worker.load
        most = BATCHES * load.speed.prefill_step_tokens if load is not None else 0
        if most and books.computing + books.others_waiting >= most:
            return True
        places = worker.description.max_sequences
        here = worker.placed_sequences + books.others_sequences
        return worker.identity.role == "decode" and bool(places) and here >= places
