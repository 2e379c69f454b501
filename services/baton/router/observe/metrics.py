"""What a router counts.

Of tenants there is a label for each that called, as the file of API keys names it, and one for all
others: callers choose no label.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.core.admission.refusal import Limit
from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError
from baton.core.observe.stages import StageTimes
from baton.core.observe.timings import BOUNDS_S, Timings, together
from baton.core.request.attempt import TokenLog
from baton.core.request.request import Request
from baton.core.routing.scaling import ScalingPolicy
from baton.router.observe.pool_targets import PoolTargets
from baton.router.workers.fleet import Fleet
from baton.router.workers.replicas import Replicas
from baton.rpc.metrics import (
    INTER_TOKEN,
    LEAKS,
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
    totals,
)

if TYPE_CHECKING:
    from baton.core.admission.fair_queue import FairQueue
    from baton.router.config import RouterConfig
    from baton.router.request.admission import AdmissionController
    from baton.router.request.dispatcher import PendingAttempt


from baton.core.request.request import ChatPrompt
from baton.rpc import aliases
from baton.rpc import trace_names as names
from baton.rpc.tracing import error_type

# What a router measures of requests under vLLM's names, for dashboards made for it.
#
# On routers alone: whoever adds up pods counts each request once.


class VllmTimes:
    """One per router process. between: times between tokens by model, as they are kept anyway."""

    def __init__(
        self, between: Mapping[str, Timings], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._first_token = histogram(aliases.FIRST_TOKEN, registry)
        self._request = histogram(aliases.REQUEST_TIME, registry)
        self._per_token = histogram(aliases.PER_TOKEN, registry)
        self._prompt_tokens = counter(aliases.PROMPT_TOKENS, registry)
        self._output_tokens = counter(aliases.OUTPUT_TOKENS, registry)
        self._succeeded = counter(aliases.SUCCEEDED, registry)
        timings(
            aliases.INTER_TOKEN,
            lambda: {(model,): times for model, times in dict(between).items()},
            registry,
        )

    def accepted(self, model: str, prompt_tokens: int) -> None:
        self._prompt_tokens.labels(model).inc(prompt_tokens)

    def ended(
        self,
        model: str,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog],
    ) -> None:
        """A request that `model` ran is over. logs: of its choices."""
        self._output_tokens.labels(model).inc(sum(map(len, logs)))
        longest = max(map(len, logs), default=0)
        if error is not None or not longest:
            return
        self._request.labels(model).observe(times.total_s)
        self._first_token.labels(model).observe(times.first_token_s)
        if longest > 1:
            rest_s = times.total_s - times.first_token_s
            self._per_token.labels(model).observe(rest_s / (longest - 1))
        for reason in (log.finish_reason for log in logs):
            if reason is not None:
                self._succeeded.labels(model, reason.name.lower()).inc()


# What a router measures of requests under OpenTelemetry's GenAI names.
#
# A request is told once, when it is over. Prometheus writes dots as underscores and a unit behind
# the name. The conventions still change: every name of them that is a metric's is in this file.

_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
DURATION = Spec(
    "gen_ai_server_request_duration_seconds",
    "From arrival to the end, of every request.",
    (*_LABELS, "error_type"),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
FIRST_TOKEN = Spec(
    "gen_ai_server_time_to_first_token_seconds",
    "From arrival to the first token, of requests that ended well.",
    _LABELS,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN = Spec(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time of each token behind the first, of requests that ended well.",
    _LABELS,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)


class GenAiMetrics:
    """One per router process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._duration = histogram(DURATION, registry)
        self._first_token = histogram(FIRST_TOKEN, registry)
        self._per_token = histogram(PER_TOKEN, registry)

    def ended(
        self,
        request: Request,
        model: str,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog],
    ) -> None:
        """model: the one that ran it, or "": what a client asked for may be any text. logs: of its
        choices."""
        chat = isinstance(request.prompt, ChatPrompt)
        labels = (names.CHAT if chat else names.TEXT_COMPLETION, names.BATON, model, model)
        self._duration.labels(*labels, error_type(error)).observe(times.total_s)
        longest = max(map(len, logs), default=0)
        if error is not None or not longest:
            return
        self._first_token.labels(*labels).observe(times.first_token_s)
        if longest > 1:
            rest_s = times.total_s - times.first_token_s
            self._per_token.labels(*labels).observe(rest_s / (longest - 1))


MIGRATIONS = Spec(
    "baton_migrations_total",
    "Attempts that went on elsewhere with output tokens already accepted.",
)
RETRIES = Spec("baton_retries_total", "Attempts run again before any output token was accepted.")
KV_BYTES = Spec("baton_kv_bytes_total", "KV bytes that decode workers collected from others.")
REFUSALS = Spec("baton_refusals_total", "Requests that were not let in, by why.", ("reason",))
REQUEST_STAGE = Spec(
    "baton_request_stage_seconds",
    "Time that requests spent in a stage they passed; the stages of one add up to all its time.",
    ("stage",),
    buckets=BOUNDS_S,
)
TENANT_REQUESTS = Spec(
    "baton_tenant_requests_total", "Requests of a tenant that ended.", ("tenant", "outcome")
)
TENANT_REFUSALS = Spec(
    "baton_tenant_refusals_total",
    "Requests of a tenant that were not let in, by why.",
    ("tenant", "reason"),
)
TENANT_TOKENS = Spec(
    "baton_tenant_tokens_total",
    "Tokens of a tenant: of prompts that were let in, and of output.",
    ("tenant", "kind"),
)
TENANT_FIRST_TOKEN = Spec(
    "baton_tenant_time_to_first_token_seconds",
    "From arrival to the first token, by tenant.",
    ("tenant",),
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)

MAX_TENANTS = 256
OTHER_TENANTS = "(other)"
"""No name that a tenant can have: whoever calls where no key is asked for, and those beyond."""

QUEUED = Spec("baton_queued_requests", "Requests that were let in and wait for their turn.")
QUEUED_TOKENS = Spec("baton_queued_tokens", "What requests that wait are expected to come to.")
CONCURRENCY_LIMITER = Spec(
    "baton_flight_window_tokens", "Tokens that may be with workers without a first token."
)
MOVES = Spec(
    "baton_moves_total",
    "Running sequences that were to leave a decode worker with their KV, by what became of it.",
    ("outcome",),
)
LOOP_STALLS = Spec(
    "baton_loop_stalls_total",
    "Times that the event loop did not come round for half a second: stopped, or without CPU.",
)
LOOP_STALLED = Spec(
    "baton_loop_stalled_seconds_total", "Time in which the event loop did not come round."
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
POOL_TARGETS = Spec(
    "baton_pool_target_workers",
    "How many workers the rule of core/scaling asks for, by what this router sees.",
    ("role",),
)
CACHE_GAPS = Spec(
    "baton_cache_event_gaps_total", "How often cache events of a worker were missing.", ("role",)
)


class RouterMetrics:
    """One per router process."""

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, *, gen_ai: bool = False, vllm: bool = False
    ) -> None:
        """gen_ai, vllm: measures requests under OpenTelemetry's or vLLM's names too."""
        self._registry = registry
        self.kv_bytes = counter(KV_BYTES, registry)
        self.moves = counter(MOVES, registry)
        self._refusals = counter(REFUSALS, registry)
        self._prompt_tokens = counter(PROMPT_TOKENS, registry)
        self._prompt_tokens_so_far = 0
        self._first_token = histogram(TIME_TO_FIRST_TOKEN, registry)
        self.request_s = histogram(REQUEST_TIME, registry)
        self.between_tokens: defaultdict[str, Timings] = defaultdict(Timings)
        """By name of the model."""
        timings(INTER_TOKEN, lambda: {(): together([*self.between_tokens.values()])}, registry)
        self._requests = counter(REQUESTS, registry)
        self._gen_ai = GenAiMetrics(registry) if gen_ai else None
        self._vllm = VllmTimes(self.between_tokens, registry) if vllm else None
        self._stages = histogram(REQUEST_STAGE, registry)
        self._tenants: set[str] = set()
        self._tenant_requests = counter(TENANT_REQUESTS, registry)
        self._tenant_refusals = counter(TENANT_REFUSALS, registry)
        self._tenant_tokens = counter(TENANT_TOKENS, registry)
        self._tenant_first_token = histogram(TENANT_FIRST_TOKEN, registry)
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
            totals(CACHE_GAPS, gaps, self._registry),
            gauge(REQUESTS_OPEN, lambda: {(): float(num_requests())}, self._registry),
            gauge(WORKERS, workers, self._registry),
            gauge(STANDBYS, standbys, self._registry),
            totals(LOOP_STALLS, lambda: {(): float(fleet.awake.stalls)}, self._registry),
            totals(LOOP_STALLED, lambda: {(): fleet.awake.stalled_s}, self._registry),
            gauge(REPLICAS, lambda: {(): float(replicas.live_replicas())}, self._registry),
        ]

    def watch_leaks(
        self, num_requests: Callable[[], int], held: Callable[[], Mapping[str, int]]
    ) -> list[Callable[[], None]]:
        """As `watch`. held: what requests hold, by kind, which is a leak when there are none; for a
        moment after the last one this may see what is just being freed."""

        def leaks() -> dict[tuple[str, ...], float]:
            busy = num_requests() > 0
            return {(kind,): 0.0 if busy else float(number) for kind, number in held().items()}

        return [gauge(LEAKS, leaks, self._registry)]

    def watch_targets(
        self,
        config: RouterConfig,
        fleet: Fleet,
        queue: FairQueue[PendingAttempt],
        replicas: Replicas,
    ) -> list[Callable[[], None]]:
        """As `watch`; nothing without a target for the first token."""
        if not config.target_first_token_ms:
            return []
        policy = ScalingPolicy(
            config.target_first_token_ms / 1000,
            config.target_between_tokens_ms / 1000,
            lead_s=config.target_startup_s,
            # Who scales by it holds what was needed itself.
            hold_s=0.0,
        )
        targets = PoolTargets(
            policy,
            fleet.prefills.snapshots,
            fleet.decodes.snapshots,
            lambda: (entry.item.input_tokens for entry in queue),
            lambda: self._prompt_tokens_so_far,
            replicas.live_replicas,
            monotonic,
        )
        return [gauge(POOL_TARGETS, targets.read, self._registry)]

    def refused(self, limit: Limit, tenant: Tenant) -> None:
        self._refusals.labels(limit.value).inc()
        self._tenant_refusals.labels(self._label(tenant), limit.value).inc()

    def accepted(self, tenant: Tenant, model: str, prompt_tokens: int) -> None:
        """A request's prompt is encoded and let in."""
        if self._vllm is not None:
            self._vllm.accepted(model, prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_tokens_so_far += prompt_tokens
        self._tenant_tokens.labels(self._label(tenant), "prompt").inc(prompt_tokens)

    def first_token(self, tenant: Tenant, seconds: float) -> None:
        """A client gets its first text, so long after its request arrived."""
        self._first_token.observe(seconds)
        self._tenant_first_token.labels(self._label(tenant)).observe(seconds)

    def watch_gate(self, gate: AdmissionController) -> list[Callable[[], None]]:
        """As `watch`."""
        return [
            gauge(QUEUED, lambda: {(): float(len(gate.queue))}, self._registry),
            gauge(QUEUED_TOKENS, lambda: {(): float(gate.queue.tokens)}, self._registry),
            gauge(CONCURRENCY_LIMITER, lambda: {(): gate.dispatcher.window.limit}, self._registry),
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

    def ended(self, error: BaseException | None, tenant: Tenant) -> None:
        """A request ended: well, by a failure of ours, or because its client left."""
        outcome = outcome_of(error)
        self._requests.labels(outcome).inc()
        self._tenant_requests.labels(self._label(tenant), outcome).inc()

    def spent(self, tenant: Tenant, times: StageTimes, output_tokens: int) -> None:
        """What a request that was let in came to."""
        self._tenant_tokens.labels(self._label(tenant), "output").inc(output_tokens)
        for stage, seconds in times.spent().items():
            if seconds > 0.0:
                self._stages.labels(stage).observe(seconds)

    def over(
        self,
        request: Request,
        model: str,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog] = (),
    ) -> None:
        """A request is over, whether it was let in or not: see `GenAiMetrics.ended`."""
        if self._gen_ai is not None:
            self._gen_ai.ended(request, model, error, times, logs)
        if self._vllm is not None and model:
            self._vllm.ended(model, error, times, logs)

    def _label(self, tenant: Tenant) -> str:
        name = tenant.name
        if name not in self._tenants:
            if not name or len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(name)
        return name


def outcome_of(error: BaseException | None) -> str:
    """How a request ended, as metrics name it."""
    if error is None:
        return "finished"
    return error.reason.name.lower() if isinstance(error, BatonError) else "cancelled"
