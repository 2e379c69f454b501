"""What a worker tells the router and the metrics about itself; decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.core.load import WorkerDescription, WorkerLoad, WorkerState
from baton.core.model import WorkerIdentity
from baton.core.ports import ModelRunner
from baton.core.scheduling import Scheduler
from baton.engine.thread import EngineThread
from baton.kv.staging import Staging
from baton.kv.stats import HandoverStats
from baton.rpc import metrics
from baton.worker.engine import is_exact

Gauge = dict[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Report:
    """Reads the worker's parts; every reading is of this moment.

    side: giver or collector. scheduler: the engine thread's own; only counts of it are read here.
    num_attempts: attempts the service knows of, whatever they wait for.
    """

    engine: EngineThread[Any]
    staging: Staging
    stats: HandoverStats
    side: str
    num_blocks: int
    scheduler: Scheduler
    state: Callable[[], WorkerState]
    num_attempts: Callable[[], int]

    def worker_load(self) -> WorkerLoad:
        load = self.engine.load
        return WorkerLoad(
            state=self.state(),
            waiting_sequences=load.waiting_sequences,
            waiting_tokens=load.waiting_tokens,
            running_sequences=load.running_sequences,
            free_blocks=load.free_blocks,
            step_age_us=round(self.engine.step_age_s * 1e6),
            step_predicted_us=round(self.engine.step_predicted_s * 1e6),
        )

    def export(self) -> None:
        """Puts this worker's gauges and hand-over totals on /metrics."""
        metrics.gauge(metrics.BLOCKS, self._blocks)
        metrics.gauge(metrics.SWAP_BLOCKS, self._swap_blocks)
        metrics.gauge(metrics.SLOTS, self._slots)
        metrics.gauge(metrics.SEQUENCES, self._sequences)
        metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): self.engine.load.waiting_tokens})
        metrics.gauge(metrics.LEAKS, self._leaks)
        metrics.gauge(metrics.PREEMPTIONS, self._preemptions)
        metrics.gauge(metrics.HANDOVERS, self._handovers)
        metrics.gauge(metrics.HANDOVER_BYTES, lambda: {(self.side,): self.stats.payload_bytes})
        metrics.gauge(metrics.PARCELS_REFUSED, lambda: {(): self.stats.mismatches.total()})

    def _blocks(self) -> Gauge:
        free = self.engine.load.free_blocks
        return {("free",): free, ("used",): self.num_blocks - free}

    def _swap_blocks(self) -> Gauge:
        load = self.engine.load
        states = {"free": load.swap_free, "used": load.swap_used}
        return {
            (place, state): blocks
            for state, counts in states.items()
            for place, blocks in zip(("host", "disk"), counts, strict=True)
        }

    def _slots(self) -> Gauge:
        ring = self.staging.ring
        used = ring.num_slots - ring.num_free - ring.num_limbo
        states = {"free": ring.num_free, "used": used, "limbo": ring.num_limbo}
        return {(self.side, state): count for state, count in states.items()}

    def _sequences(self) -> Gauge:
        load = self.engine.load
        return {("waiting",): load.waiting_sequences, ("running",): load.running_sequences}

    def _preemptions(self) -> Gauge:
        return {(kind,): n for kind, n in self.scheduler.preemptions.items()}

    def _handovers(self) -> Gauge:
        return {(self.side, outcome): n for outcome, n in dict(self.stats.outcomes).items()}

    def _leaks(self) -> Gauge:
        """Blocks in use though no attempt is here: nobody would ever free them."""
        used = self.num_blocks - self.engine.load.free_blocks
        return {("blocks",): 0 if self.num_attempts() else used}


def describe(
    runner: ModelRunner, identity: WorkerIdentity, transports: tuple[str, ...]
) -> WorkerDescription:
    """What a prefill or decode worker is."""
    return WorkerDescription(
        identity=identity,
        model=runner.model,
        layout=runner.layout,
        transports=transports,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        kv_bytes_per_position=runner.layout.bytes_per_position,
        exact=is_exact(runner),
    )
