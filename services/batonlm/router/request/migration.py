"""Migrates work off workers: sequences with their KV, and texts.

Everything leaves a worker that drains. Texts are reopened elsewhere from the token log, all at
once. Of the sequences of one worker a few migrate at a time, so that both staging pools and both
engines keep serving the rest; the others keep running until their turn. Sequences that cannot
migrate end on the draining worker.

From a worker that serves, single sequences migrate when the pool of decode workers is unevenly
loaded, when the worker's memory for KV runs out, or when a request needs their room
(`batonlm.core.routing.rebalance`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from batonlm.core.request.attempt import SequenceKey
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerState
from batonlm.core.routing.rebalance import (
    MoveReason,
    Newcomer,
    PlannedMove,
    Rebalancer,
    Stream,
)
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
    """Migrates the work of one router while `run` runs."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        rebalancer: Rebalancer,
        newcomer: Callable[[], Newcomer | None],
    ) -> None:
        """newcomer: returns the next waiting attempt if it waits for memory."""
        self._fleet = fleet
        self._metrics = metrics
        self._rebalancer = rebalancer
        self._newcomer = newcomer
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
        self._rebalance()

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
        for sink, stream in _movable(sender):
            if len(leaving.moves) >= AT_ONCE:
                return
            if stream.key in leaving.stayed:
                continue
            receiver = self._receiver(sender, leaving, stream)
            if receiver is not None:
                move = Migration(stream.key, sender.client, receiver, MoveReason.DRAIN)
                leaving.moves[move] = stream.positions
                self._move(sink, move, partial(self._left, leaving))

    def _left(self, leaving: _Leaving, move: Migration) -> None:
        """The migration of a sequence that leaves a draining worker is over, or takes too long."""
        now = asyncio.get_running_loop().time()
        del leaving.moves[move]
        match move.outcome:
            case MigrationOutcome.STAYED:
                leaving.stayed[move.key] = now + STAYED_S
            case MigrationOutcome.FAILED | MigrationOutcome.RETURNED:
                leaving.failed[move.receiver.instance_id] = now + FAILED_S

    def _rebalance(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._rebalancer.is_due(now):
            return
        pool = self._fleet.decodes
        workers = {worker.identity.instance_id: worker for worker in pool.usable(now)}
        snapshots = [snapshot for w in workers.values() if (snapshot := w.snapshot) is not None]
        sinks: dict[SequenceKey, SequenceSink] = {}

        def streams(instance_id: str) -> list[Stream]:
            found = list(_movable(workers[instance_id]))
            sinks.update({stream.key: sink for sink, stream in found})
            return [stream for _, stream in found]

        for planned in self._rebalancer.plan(snapshots, streams, now, self._newcomer()):
            key = planned.stream.key
            receiver = workers[planned.receiver].identity
            move = Migration(key, workers[planned.giver].client, receiver, planned.reason)
            self._move(sinks[key], move, partial(self._rebalanced, planned))

    def _rebalanced(self, planned: PlannedMove, move: Migration) -> None:
        outcome = move.outcome
        self._rebalancer.ended(
            planned,
            asyncio.get_running_loop().time(),
            moved=outcome is MigrationOutcome.MOVED,
            refused=outcome in (MigrationOutcome.RETURNED, MigrationOutcome.FAILED),
        )

    def _receiver(
        self, sender: Worker[DecodeSession], leaving: _Leaving, stream: Stream
    ) -> WorkerIdentity | None:
        sender_now = sender.snapshot
        if sender_now is None:
            return None
        demand = Demand(
            request_id=sender.identity.instance_id,
            # The load of receivers may not include the migrations in progress yet.
            input_tokens=stream.positions + sum(leaving.moves.values()),
            choices=1 + len(leaving.moves),
            needs_decode=True,
            model=sender.model.name,
            model_digest=sender.model.digest,
            tokenizer_digest=sender.model.tokenizer_digest,
            adapter=stream.adapter,
            failed=frozenset(leaving.failed),
        )
        return receiver_for(demand, self._fleet.decodes.snapshots(), sender_now)

    def _move(
        self, sink: SequenceSink, move: Migration, ended: Callable[[Migration], None]
    ) -> None:
        """Starts a migration. ended: called when it is over, or takes too long."""
        sink.move(move)
        task = asyncio.create_task(self._follow(move, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, move: Migration, ended: Callable[[Migration], None]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await move.over()
        except TimeoutError:
            return
        finally:
            ended(move)
        self._metrics.moves.labels(move.reason.value, outcome.value).inc()
        self._look()


def _movable(sender: Worker[DecodeSession]) -> Iterator[tuple[SequenceSink, Stream]]:
    """Yields sequences that run there and are not migrating."""
    for sink in sender.client.sinks():
        for stream in sink.movable():
            yield sink, stream
