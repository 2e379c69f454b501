"""What a worker reports to routers and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batonlm.core.observe.timings import Durations
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed
from batonlm.core.scheduler.plan import ModelRunner, StepPlan
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.thread import EngineThread
from batonlm.rpc import metrics
from batonlm.transfer.stats import MISMATCHES, HandoverStats
from batonlm.transfer.transports import Staging
from batonlm.worker.engine import is_exact
from batonlm.worker.self_test import KvSelfTest
from batonlm.worker.service import AttemptService
from batonlm.worker.tiers.prefix_tiers import PrefixTiers

Gauge = dict[tuple[str, ...], float]

_STEP_TIME = metrics.histogram(metrics.STEP_TIME)
_STEP_TOKENS = metrics.histogram(metrics.STEP_TOKENS)
_STEP_SEQUENCES = metrics.histogram(metrics.STEP_SEQUENCES)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Reads load and metrics from the worker's parts."""

    engine: EngineThread
    staging: Staging
    stats: HandoverStats
    """The receiver's, and the self-test's."""
    side: str
    """What the staging pool is mostly for: sender or receiver."""
    num_blocks: int
    scheduler: Scheduler
    """It belongs to the engine thread; only its counters and its speed are read here."""
    service: AttemptService[Any]
    self_test: KvSelfTest
    tiers: PrefixTiers | None = None

    def worker_load(self) -> WorkerLoad:
        load = self.engine.load
        return WorkerLoad(
            state=self.self_test.limit(self.service.state),
            waiting_sequences=load.waiting_sequences,
            waiting_tokens=load.waiting_tokens,
            running_sequences=load.running_sequences,
            free_blocks=load.free_blocks,
            step_age_us=round(self.engine.step_age_s * 1e6),
            step_predicted_us=round(self.engine.step_predicted_s * 1e6),
            orphans=self.service.orphans,
            speed=self._speed(),
        )

    def _speed(self) -> WorkerSpeed:
        link = self.stats.link
        speed = replace(
            self.scheduler.speed, link_bytes_per_s=link.bytes_per_s, handover_s=link.handover_s
        )
        return speed if self.tiers is None else self.tiers.with_rates(speed)

    def export(self) -> None:
        """Exports this worker's gauges and hand-over totals on /metrics."""
        metrics.gauge(metrics.BLOCKS, self._blocks)
        metrics.gauge(metrics.SWAP_BLOCKS, self._swap_blocks)
        metrics.gauge(metrics.BUFFERS, self._buffers)
        metrics.gauge(metrics.SEQUENCES, self._sequences)
        metrics.gauge(metrics.WAITING_TOKENS, lambda: {(): self.engine.load.waiting_tokens})
        metrics.gauge(metrics.LEAKS, self._leaks)
        metrics.totals(metrics.PREEMPTIONS, lambda: _by_kind(self.scheduler.preemptions))
        if self.scheduler.speculation is not None:
            metrics.totals(metrics.DRAFTS, self._drafts)
            metrics.totals(metrics.SAVED_STEPS, self._saved_steps)
        metrics.gauge(metrics.ATTEMPTS_HERE, lambda: {(): self.service.num_attempts})
        mismatches = self.stats.mismatches
        metrics.totals(metrics.KV_CHUNKS_REFUSED, lambda: {(k,): mismatches[k] for k in MISMATCHES})
        metrics.totals(metrics.TRANSFER_ERRORS, lambda: {(): self.stats.transfer_errors})
        metrics.totals(metrics.PEERS_MET, lambda: {(): self.stats.peers_met})
        metrics.totals(metrics.PROBES, self._probes)

    def export_aliases(self, model: str, block_size: int) -> None:
        """Exports the load on /metrics under vLLM's names too."""
        config = (model, str(block_size), str(self.num_blocks))
        metrics.gauge(metrics.VLLM_RUNNING, lambda: {(model,): self.engine.load.running_sequences})
        metrics.gauge(metrics.VLLM_WAITING, lambda: {(model,): self.engine.load.waiting_sequences})
        metrics.gauge(
            metrics.VLLM_KV_USAGE,
            lambda: {(model,): 1 - self.engine.load.free_blocks / self.num_blocks},
        )
        metrics.gauge(metrics.VLLM_CACHE_CONFIG, lambda: {config: 1})

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

    def _buffers(self) -> Gauge:
        ring = self.staging.ring
        used = ring.num_buffers - ring.num_free - ring.num_orphaned
        states = {"free": ring.num_free, "used": used, "orphaned": ring.num_orphaned}
        return {(self.side, state): count for state, count in states.items()}

    def _sequences(self) -> Gauge:
        load = self.engine.load
        return {("waiting",): load.waiting_sequences, ("running",): load.running_sequences}

    def _drafts(self) -> Gauge:
        speculation = self.scheduler.speculation
        assert speculation is not None
        found: Gauge = {}
        for kind, counts in speculation.counts.items():
            found[kind, "computed"] = counts.drafted
            found[kind, "accepted"] = counts.accepted
        return found

    def _saved_steps(self) -> Gauge:
        speculation = self.scheduler.speculation
        assert speculation is not None
        return {(kind,): counts.saved_steps for kind, counts in speculation.counts.items()}

    def _probes(self) -> Gauge:
        return {labels: number for labels, number in dict(self.stats.probes).items()}

    def _leaks(self) -> Gauge:
        """What is held without any attempt, by kind: a value that stays above 0 is a leak.

        Orphaned buffers are not counted: a transfer owns them. For a moment after the last attempt
        or a probe, values may include what is being freed.
        """
        load, ring = self.engine.load, self.staging.ring
        held = {
            "blocks": self.num_blocks - load.free_blocks,
            "swap_blocks": sum(load.swap_used),
            "sequences": load.waiting_sequences + load.running_sequences,
            "buffers": ring.num_buffers - ring.num_free - ring.num_orphaned,
            **self.service.holdings,
        }
        busy = self.service.num_attempts > 0 or self.service.probing or self.self_test.probing
        return _by_kind(dict.fromkeys(held, 0) if busy else held)


def _by_kind(counts: Mapping[str, float]) -> Gauge:
    return {(kind,): count for kind, count in counts.items()}


def count_step(plan: StepPlan, seconds: float) -> None:
    """Adds a step to the metrics."""
    _STEP_TIME.observe(seconds)
    _STEP_TOKENS.observe(plan.num_tokens)
    _STEP_SEQUENCES.observe(len(plan.chunks))


def export_handovers(side: str, stats: HandoverStats) -> None:
    """Exports the totals of one side's hand-overs on /metrics."""

    def outcomes() -> Gauge:
        return {(side, outcome): n for outcome, n in dict(stats.outcomes).items()}

    def stages() -> dict[tuple[str, ...], Durations]:
        return {(side, stage): times for stage, times in dict(stats.stages).items()}

    metrics.totals(metrics.HANDOVERS, outcomes)
    metrics.totals(metrics.HANDOVER_BYTES, lambda: {(side,): stats.payload_bytes})
    metrics.totals(metrics.KV_CHUNKS, lambda: {(side,): stats.kv_chunks})
    metrics.timings(metrics.HANDOVER_STAGE, stages)


def describe(
    runner: ModelRunner,
    identity: WorkerIdentity,
    transports: tuple[str, ...],
    max_sequences: int,
    standby: bool = False,
) -> WorkerDescription:
    """The description of a prefill or decode worker for routers."""
    return WorkerDescription(
        identity=identity,
        model=runner.model,
        layout=runner.layout,
        transports=transports,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        kv_bytes_per_position=runner.layout.bytes_per_position,
        exact=is_exact(runner),
        max_sequences=max_sequences,
        standby=standby,
    )
