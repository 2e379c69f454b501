"""One worker as a router sees it: what it is, what it reports, and what this router gave it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.core.errors import BatonError
from baton.core.request.model import ModelDescription, WorkerIdentity
from baton.core.request.request_state import is_fault
from baton.core.routing.breaker import Breaker
from baton.core.routing.load import WorkerDescription, WorkerLoad
from baton.core.routing.worker_cost import WorkerSnapshot

_NO_MODEL = ModelDescription("", "", 0, 0, ())


class Client(Protocol):
    """What a pool keeps per worker."""

    @property
    def ready(self) -> bool:
        """Whether new work may be given to it."""

    async def run(self) -> None:
        """Runs while the instance id lives; cancelled when it is gone, it tells its users so."""


C = TypeVar("C", bound=Client)


@dataclass(slots=True, eq=False)
class Worker(Generic[C]):
    """One instance id. number: in the pool's prefix index. since: when it was met, on the loop's
    clock. placed_*: what this router gave it and has not taken back; fresh_*: since its newest
    report, which cannot know of it. breaker: the instance id's own, also when it was out of sight
    for a while.
    """

    description: WorkerDescription
    client: C
    running: asyncio.Task[None]
    breaker: Breaker
    number: int = -1
    since: float = 0.0
    load: WorkerLoad | None = None
    placed_sequences: int = 0
    placed_tokens: int = 0
    fresh_sequences: int = 0
    fresh_tokens: int = 0
    fresh_positions: int = 0
    _snapshot: WorkerSnapshot | None = None

    @property
    def identity(self) -> WorkerIdentity:
        return self.description.identity

    @property
    def model(self) -> ModelDescription:
        return self.description.model or _NO_MODEL

    def report(self, load: WorkerLoad) -> None:
        """News of its load."""
        self.load = load
        self.fresh_sequences = self.fresh_tokens = self.fresh_positions = 0
        self._snapshot = self._look(load)

    def place(self, sequences: int, tokens: int = 0, positions: int = 0) -> Placed:
        """Gives it sequences that need so many positions, and so many tokens to prefill."""
        self.placed_sequences += sequences
        self.placed_tokens += tokens
        self.fresh_sequences += sequences
        self.fresh_tokens += tokens
        self.fresh_positions += positions
        self._snapshot = None
        probes = self.breaker.placed()
        return Placed(self, sequences, tokens, probes)

    def take_back(self, sequences: int, tokens: int) -> None:
        """What `Placed` calls."""
        self.placed_sequences -= sequences
        self.placed_tokens -= tokens
        self._snapshot = None

    def gained(self) -> None:
        """An attempt got somewhere here; told once per attempt."""
        self.breaker.gained(asyncio.get_running_loop().time())

    def blamed(self, error: BatonError) -> None:
        """An attempt was lost here."""
        if is_fault(error):
            self.breaker.lost(asyncio.get_running_loop().time())

    @property
    def snapshot(self) -> WorkerSnapshot | None:
        """None before its first report. Kept until something changes: a decision goes through all
        of a pool's."""
        if self._snapshot is None and self.load is not None:
            self._snapshot = self._look(self.load)
        return self._snapshot

    def _look(self, load: WorkerLoad) -> WorkerSnapshot:
        description = self.description
        return WorkerSnapshot(
            identity=self.identity,
            model=self.model,
            load=load,
            layout=description.layout,
            transports=description.transports,
            block_size=max(1, description.block_size),
            num_blocks=description.num_blocks,
            kv_bytes_per_position=description.kv_bytes_per_position,
            max_sequences=description.max_sequences,
            standby=description.standby,
            number=self.number,
            since=self.since,
            placed_sequences=self.placed_sequences,
            placed_tokens=self.placed_tokens,
            fresh_sequences=self.fresh_sequences,
            fresh_tokens=self.fresh_tokens,
            fresh_positions=self.fresh_positions,
        )


class Placed:
    """Work that is on a worker until it is released. `with` releases it, too.

    probes: it is the one attempt that a half-open breaker lets through.
    """

    __slots__ = ("_probes", "_sequences", "_tokens", "_worker")

    def __init__(self, worker: Worker[C], sequences: int, tokens: int, probes: bool) -> None:
        self._worker = worker
        self._probes = probes
        self._sequences = sequences
        self._tokens = tokens

    def computed(self) -> None:
        """Its tokens are prefilled; the sequences stay."""
        self._worker.take_back(0, self._tokens)
        self._tokens = 0

    def release(self) -> None:
        """Without effect the second time."""
        self._worker.take_back(self._sequences, self._tokens)
        self._sequences = self._tokens = 0
        probes, self._probes = self._probes, False
        if probes:
            self._worker.breaker.left()

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
