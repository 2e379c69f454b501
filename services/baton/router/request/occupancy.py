"""FleetLedger, which workers are full, as far as one router can know (`WorkerLedger`); decides
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.core.routing.worker_ledger import WorkerLedger
from baton.router.workers.fleet import Fleet
from baton.router.workers.worker import Worker

if TYPE_CHECKING:
    from baton.router.request.placement import Placement

REFRESH_S = 0.005


class FleetLedger:
    """full: instance ids of workers that should get nothing more now."""

    def __init__(self, fleet: Fleet) -> None:
        self.full: set[str] = set()
        self._fleet = fleet
        self._books: dict[str, WorkerLedger] = {}
        self._refreshed_at = float("-inf")

    @property
    def held(self) -> dict[str, int]:
        """What attempts without a first token have with all workers, by kind."""
        books = list(self._books.values())
        return {
            "computing_tokens": sum(one.computing for one in books),
            "kv_positions": sum(one.kv for one in books),
        }

    def refresh(self, now: float) -> None:
        """Takes the newest reports, if that was not done a moment ago."""
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        live: set[str] = set()
        for pool in (self._fleet.prefills, self._fleet.decodes):
            for worker in pool.workers():
                live.add(worker.identity.instance_id)
                self.update(worker)
        self.full &= live
        for gone in [i for i, b in self._books.items() if i not in live and b.is_empty]:
            del self._books[gone]

    def update(self, worker: Worker[Any]) -> None:
        """What the worker has may have changed."""
        if self._is_full(worker, self._read(worker)):
            self.full.add(worker.identity.instance_id)
        else:
            self.full.discard(worker.identity.instance_id)

    def take(self, place: Placement, input_tokens: int, choices: int) -> Callable[[], None]:
        """The workers get an attempt's input. Returns what undoes it."""
        computes = place.prefill or place.decode
        assert computes is not None
        computing = self._book(computes.identity.instance_id)
        holding = None if place.decode is None else self._book(place.decode.identity.instance_id)
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
        books = self._read(worker)
        block_size = worker.description.block_size
        return books.has_kv(worker.placed_sequences, block_size, positions)

    def _book(self, instance_id: str) -> WorkerLedger:
        return self._books.setdefault(instance_id, WorkerLedger())

    def _read(self, worker: Worker[Any]) -> WorkerLedger:
        books = self._book(worker.identity.instance_id)
        books.read(worker.load, worker.placed_sequences)
        return books

    def _is_full(self, worker: Worker[Any], books: WorkerLedger) -> bool:
        places = worker.description.max_sequences if worker.identity.role == "decode" else 0
        return books.is_full(worker.placed_sequences, places)
