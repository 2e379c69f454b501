"""Migrates work off draining workers: sequences with their KV, and texts.

Texts are reopened elsewhere from the token log, all at once. Of the sequences of one worker a few
migrate at a time, so that both staging pools and both engines keep serving the rest; the others
keep running until their turn. Sequences that cannot migrate end on the draining worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from batonlm.core.request.attempt import SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerState
from batonlm.core.routing.routing import Demand, receiver_for
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.workers.decode_session import (
    DecodeSession,
    Migration,
    MigrationOutcome,
    SequenceSink,
)
from batonlm.router.workers.fleet import Fleet, Worker

AT_ONCE = 4
"""Sequences of one worker that migrate at the same time."""

LOOK_AGAIN_S = 0.25

STAYED_S = 0.25
"""Seconds before a sequence that could not migrate is tried again."""

FAILED_S = 5.0
"""Seconds for which a receiver that did not get a sequence's KV is skipped."""

PATIENCE_S = 60.0
"""A migration that takes longer no longer blocks others; it ends by itself."""


@dataclass(slots=True)
class _Leaving:
    """The migrations off one draining worker. Times are when to try again, on the loop's clock."""

    moves: dict[Migration, int] = field(default_factory=dict)
    """Migrations in progress, with the positions of each."""
    stayed: dict[SequenceKey, float] = field(default_factory=dict)
    failed: dict[str, float] = field(default_factory=dict)


class Migrator:
    """Migrates work off the draining workers of one router while `run` runs."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._leaving: dict[str, _Leaving] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            while True:
                self._look()
                await self._fleet.changed.wait(LOOK_AGAIN_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _look(self) -> None:
        draining = {
            worker.identity.instance_id: worker
            for worker in self._fleet.decodes.workers()
            if worker.load is not None and worker.load.state is WorkerState.DRAINING
        }
        for gone in self._leaving.keys() - draining.keys():
            del self._leaving[gone]
        self._move_texts()
        for instance_id, worker in draining.items():
            self._move_some(worker, self._leaving.setdefault(instance_id, _Leaving()))

    def _move_texts(self) -> None:
        """Moves texts to another detokenizer. Without one that has the same tokenizer they end
        where they are."""
        pool = self._fleet.detokenizers
        able = {worker.model.tokenizer_digest for worker in pool.serving()}
        for worker in pool.workers():
            drains = worker.load is not None and worker.load.state is WorkerState.DRAINING
            if drains and worker.model.tokenizer_digest in able:
                worker.client.send_away()

    def _move_some(self, sender: Worker[DecodeSession], leaving: _Leaving) -> None:
        now = asyncio.get_running_loop().time()
        leaving.stayed = {key: end for key, end in leaving.stayed.items() if end > now}
        leaving.failed = {key: end for key, end in leaving.failed.items() if end > now}
        for sink, key, positions in _movable(sender, leaving):
            if len(leaving.moves) >= AT_ONCE:
                return
            receiver = self._receiver(sender, leaving, positions, sink.adapter)
            if receiver is not None:
                move = Migration(key, sender.client, receiver)
                leaving.moves[move] = positions
                sink.move(move)
                task = asyncio.create_task(self._follow(move, leaving))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _receiver(
        self, sender: Worker[DecodeSession], leaving: _Leaving, positions: int, adapter: str
    ) -> WorkerIdentity | None:
        sender_now = sender.snapshot
        if sender_now is None:
            return None
        demand = Demand(
            request_id=sender.identity.instance_id,
            # The load of receivers may not include the migrations in progress yet.
            input_tokens=positions + sum(leaving.moves.values()),
            choices=1 + len(leaving.moves),
            needs_decode=True,
            model=sender.model.name,
            model_digest=sender.model.digest,
            tokenizer_digest=sender.model.tokenizer_digest,
            adapter=adapter,
            failed=frozenset(leaving.failed),
        )
        return receiver_for(demand, self._fleet.decodes.snapshots(), sender_now)

    async def _follow(self, move: Migration, leaving: _Leaving) -> None:
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await move.over()
        except TimeoutError:
            return
        finally:
            del leaving.moves[move]
        if outcome is MigrationOutcome.STAYED:
            leaving.stayed[move.key] = now() + STAYED_S
        elif outcome is MigrationOutcome.FAILED:
            leaving.failed[move.receiver.instance_id] = now() + FAILED_S
        self._metrics.moves.labels(outcome.value).inc()
        self._look()


def _movable(
    sender: Worker[DecodeSession], leaving: _Leaving
) -> Iterator[tuple[SequenceSink, SequenceKey, int]]:
    """Yields sequences that run there and are not migrating, with their positions."""
    for sink in sender.client.sinks():
        for key, positions in sink.movable().items():
            if key not in leaving.stayed:
                yield sink, key, positions
