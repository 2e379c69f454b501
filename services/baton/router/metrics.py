"""What a router counts; knows nothing of how it is scraped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.core.errors import BatonError
from baton.core.refusal import Limit
from baton.core.timings import Timings
from baton.router.fleet import Fleet
from baton.router.replicas import Replicas
from baton.rpc.metrics import (
    INTER_TOKEN,
    LOCAL_PREFILL,
    PROMPT_TOKENS,
    REGISTRY,
    REMOTE_PREFILL,
    REQUEST_TIME,
    REQUESTS,
    REQUESTS_OPEN,
    TIME_TO_FIRST_TOKEN,
    WORKERS,
    Spec,
    counter,
    gauge,
    histogram,
    timings,
)

if TYPE_CHECKING:
    from baton.router.gate import Gate

MIGRATIONS = Spec(
    "baton_migrations_total",
    "Attempts that went on elsewhere with output tokens already accepted.",
)
RETRIES = Spec("baton_retries_total", "Attempts run again before any output token was accepted.")
KV_BYTES = Spec("baton_kv_bytes_total", "KV bytes that decode workers collected from others.")
REFUSALS = Spec("baton_refusals_total", "Requests that were not let in, by why.", ("reason",))
QUEUED = Spec("baton_queued_requests", "Requests that were let in and wait for their turn.")
QUEUED_TOKENS = Spec("baton_queued_tokens", "What requests that wait are expected to come to.")
FLIGHT_WINDOW = Spec(
    "baton_flight_window_tokens", "Tokens that may be with workers without a first token."
)
MOVES = Spec(
    "baton_moves_total",
    "Running sequences that were to leave a decode worker with their KV, by what became of it.",
    ("outcome",),
)
REPLICAS = Spec("baton_routers", "Live routers, as this one knows: budgets are shared by them.")

PREDICTIONS = Spec(
    "baton_first_token_prediction_ratio",
    "Time from an attempt's start to its first token, by the time that was predicted.",
    ("prefill",),
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
INDEX_UNITS = Spec(
    "baton_prefix_index_units",
    "Cached units of 64 tokens known of the workers of a role.",
    ("role",),
)
STANDBYS = Spec(
    "baton_standbys", "Ready workers that stand by, and whether they get work.", ("role", "state")
)
USAGE_LINES = Spec(
    "baton_usage_lines_total", "Usage records of requests, by what became of them.", ("outcome",)
)
USAGE_FAILURES = Spec(
    "baton_usage_write_failures_total", "Tries to write usage records that failed."
)
CACHE_GAPS = Spec(
    "baton_cache_event_gaps_total", "How often cache events of a worker were missing.", ("role",)
)


class RouterMetrics:
    """One per router process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self.kv_bytes = counter(KV_BYTES, registry)
        self.moves = counter(MOVES, registry)
        self._refusals = counter(REFUSALS, registry)
        self.prompt_tokens = counter(PROMPT_TOKENS, registry)
        self.first_token_s = histogram(TIME_TO_FIRST_TOKEN, registry)
        self.request_s = histogram(REQUEST_TIME, registry)
        self.between_tokens = Timings()
        timings(INTER_TOKEN, lambda: {(): self.between_tokens}, registry)
        self._requests = counter(REQUESTS, registry)
        self._remote = counter(REMOTE_PREFILL, registry)
        self._local = counter(LOCAL_PREFILL, registry)
        self._migrations = counter(MIGRATIONS, registry)
        self._retries = counter(RETRIES, registry)
        self._predictions = histogram(PREDICTIONS, registry)

    def watch(
        self, fleet: Fleet, replicas: Replicas, num_requests: Callable[[], int]
    ) -> list[Callable[[], None]]:
        """Reads gauges at every scrape until the returned functions are called."""

        def workers() -> dict[tuple[str, ...], float]:
            pools = (fleet.tokenizers, fleet.prefills, fleet.decodes, fleet.detokenizers)
            return {
                (pool.role, state): float(number)
                for pool in pools
                for state, number in pool.states().items()
            }

        def standbys() -> dict[tuple[str, ...], float]:
            return {
                (pool.role, state): float(number)
                for pool in (fleet.prefills, fleet.decodes)
                for state, number in pool.standbys().items()
            }

        indices = [(pool.role, pool.index) for pool in (fleet.prefills, fleet.decodes)]
        caches = {role: index for role, index in indices if index is not None}

        def units() -> dict[tuple[str, ...], float]:
            return {(role,): float(len(index)) for role, index in caches.items()}

        def gaps() -> dict[tuple[str, ...], float]:
            return {(role,): float(index.gaps) for role, index in caches.items()}

        return [
            gauge(INDEX_UNITS, units, self._registry),
            gauge(CACHE_GAPS, gaps, self._registry),
            gauge(REQUESTS_OPEN, lambda: {(): float(num_requests())}, self._registry),
            gauge(WORKERS, workers, self._registry),
            gauge(STANDBYS, standbys, self._registry),
            gauge(REPLICAS, lambda: {(): float(replicas.live_replicas())}, self._registry),
        ]

    def refused(self, limit: Limit) -> None:
        self._refusals.labels(limit.value).inc()

    def watch_gate(self, gate: Gate) -> list[Callable[[], None]]:
        """As `watch`."""
        return [
            gauge(QUEUED, lambda: {(): float(len(gate.queue))}, self._registry),
            gauge(QUEUED_TOKENS, lambda: {(): float(gate.queue.tokens)}, self._registry),
            gauge(FLIGHT_WINDOW, lambda: {(): gate.turnstile.window.limit}, self._registry),
        ]

    def predicted(self, first_token_s: float, took_s: float, *, remotely: bool) -> None:
        """An attempt's first token came so long after its start."""
        if first_token_s > 0.0:
            self._predictions.labels("remote" if remotely else "local").observe(
                took_s / first_token_s
            )

    def prefilled(self, *, remotely: bool) -> None:
        """An attempt's KV is complete: handed over by a prefill worker, or computed on decode."""
        (self._remote if remotely else self._local).inc()

    def retried(self, position: int) -> None:
        """A request starts another attempt at this output position."""
        (self._migrations if position else self._retries).inc()

    def ended(self, error: BaseException | None) -> None:
        """A request ended: well, by a failure of ours, or because its client left."""
        if error is None:
            outcome = "finished"
        elif isinstance(error, BatonError):
            outcome = error.reason.name.lower()
        else:
            outcome = "cancelled"
        self._requests.labels(outcome).inc()
