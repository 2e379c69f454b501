"""Counters of a router's requests; `gauges` has what it holds now.

Tenant labels are the names from the file of API keys, and one label for all other callers, so
callers cannot choose labels. Requests are counted under Baton's names and, if the operator wants
it, also under vLLM's, for existing dashboards, and under those of OpenTelemetry's GenAI
conventions. Prometheus replaces their dots by underscores and appends the unit. The conventions
still change, and all of their metric names are in this file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batonlm.core.admission.tenant_budgets import Limit
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError
from batonlm.core.observe.stages import StageTimes
from batonlm.core.observe.timings import BOUNDS_S, Durations, together
from batonlm.core.request.attempt import TokenLog
from batonlm.core.request.request import Request
from batonlm.router.observe.stage_timer import operation_of
from batonlm.rpc import metrics, tracing
from batonlm.rpc.metrics import (
    INTER_TOKEN,
    LOCAL_PREFILL,
    PROMPT_TOKENS,
    REGISTRY,
    REMOTE_PREFILL,
    REQUEST_TIME,
    REQUESTS,
    TIME_TO_FIRST_TOKEN,
    Spec,
    counter,
    histogram,
    timings,
)
from batonlm.rpc.tracing import error_type

_GEN_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
GEN_AI_DURATION = Spec(
    "gen_ai_server_request_duration_seconds",
    "From arrival to the end, of every request.",
    (*_GEN_AI_LABELS, "error_type"),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_FIRST_TOKEN = Spec(
    "gen_ai_server_time_to_first_token_seconds",
    "From arrival to the first token, of requests that ended well.",
    _GEN_AI_LABELS,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_PER_TOKEN = Spec(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time of each token behind the first, of requests that ended well.",
    _GEN_AI_LABELS,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
MIGRATIONS = Spec(
    "baton_migrations_total",
    "Attempts that went on elsewhere with output tokens already accepted.",
)
RETRIES = Spec("baton_retries_total", "Attempts run again before any output token was accepted.")
KV_BYTES = Spec("baton_kv_bytes_total", "KV bytes that workers collected from others.")
COLLECTED_TOKENS = Spec(
    "baton_prefix_tokens_total",
    "Input tokens whose KV workers collected from another one's cache, by why the attempt did not "
    "run there.",
    ("reason",),
)
REFUSALS = Spec("baton_refusals_total", "Requests that were not let in, by why.", ("reason",))
REQUEST_STAGE = Spec(
    "baton_request_stage_seconds",
    "Time that requests spent in a stage they passed; the stages of one add up to all its time.",
    ("stage",),
    buckets=BOUNDS_S,
)
ADAPTER_REQUESTS = Spec(
    "baton_adapter_requests_total", "Requests of a LoRA adapter that ended.", ("adapter", "outcome")
)
ADAPTER_TOKENS = Spec(
    "baton_adapter_tokens_total",
    "Tokens of a LoRA adapter: of prompts that were let in, and of output.",
    ("adapter", "kind"),
)
STEPS_BACK = Spec(
    "baton_alias_steps_back_total",
    "Times that this router took back a change of a name's weights, by the model that did badly.",
    ("alias", "model"),
)
SHADOW_REQUESTS = Spec(
    "baton_shadow_requests_total",
    "Requests that a shadow model was to get too, by what became of them there.",
    ("alias", "model", "outcome"),
)
SHADOW_FIRST_TOKEN = Spec(
    "baton_shadow_time_to_first_token_seconds",
    "From the start of a shadow model's request to its first token.",
    ("alias", "model"),
    TIME_TO_FIRST_TOKEN.buckets,
)
SHADOW_TIME = Spec(
    "baton_shadow_request_seconds",
    "From the start of a shadow model's request to its last token.",
    ("alias", "model"),
    REQUEST_TIME.buckets,
)
SHADOW_COMPARISONS = Spec(
    "baton_shadow_comparisons_total",
    "Greedy answers of a shadow model, by whether their tokens equal those of the real answer.",
    ("alias", "model", "outcome"),
)
CASCADE_ANSWERS = Spec(
    "baton_cascade_answers_total",
    "Requests of a name with a small and a large model, by which of them answers.",
    ("alias", "by"),
)
CASCADE_ALONE = Spec(
    "baton_cascade_alone_total",
    "Requests whose small model answers because the large one could not be asked, by why.",
    ("alias", "reason"),
)
CASCADE_CONFIDENCE = Spec(
    "baton_cascade_confidence",
    "How sure a name's small model is of its answers, as its policy measures it.",
    ("alias",),
    (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99),
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
TENANT_OBJECTIVES = Spec(
    "baton_tenant_objectives_total",
    "Requests of a tenant that were held against an objective, by whether they met it.",
    ("tenant", "objective", "outcome"),
)
MOVES = Spec(
    "baton_moves_total",
    "Running sequences that were to leave a decode worker with their KV, by why and by what became "
    "of it.",
    ("reason", "outcome"),
)
ADOPTIONS = Spec(
    "baton_adoptions_total",
    "Choices of streams that began at another router and go on here, by whether their sequences "
    "were adopted where they ran: adopted; begun elsewhere with their tokens (tokens); or computed "
    "again because no worker had one (none) or it was gone by then (failed).",
    ("outcome",),
)
PREDICTIONS = Spec(
    "baton_first_token_prediction_ratio",
    "Time from an attempt's start to its first token, by the time that was predicted.",
    ("prefill",),
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)

MAX_ADAPTERS = 1024
OTHER_ADAPTERS = "(other)"
"""A name that no adapter can have: for those beyond MAX_ADAPTERS."""

MAX_TENANTS = 256
OTHER_TENANTS = "(other)"
"""A name that no tenant can have: for callers of a router without keys, and for tenants beyond
MAX_TENANTS."""


FOR_CAPACITY = frozenset(
    (Limit.REQUESTS, Limit.TOKENS, Limit.QUEUE, Limit.WAIT, Limit.KV, Limit.DEADLINE)
)
"""Limits that more workers would raise. Those of a tenant and of bytes being read they would not.
"""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What every request is held against, in seconds; 0: no request is."""

    first_token_s: float = 0.0
    """From arrival to the first text."""
    between_tokens_s: float = 0.0
    """Mean of the tokens behind the first."""


@dataclass(slots=True)
class Arrived:
    """What has come to this router so far; counters by model name."""

    requests: Counter[str] = field(default_factory=Counter)
    """Accepted ones."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Of accepted requests."""
    placed: Counter[str] = field(default_factory=Counter)
    """Requests that got workers."""
    refused: int = 0
    """Requests refused for lack of capacity, most of them before their model is known."""


class RouterMetrics:
    """The metrics of one router process, and those of its requests under OpenTelemetry's and vLLM's
    names too."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.kv_bytes = counter(KV_BYTES, registry)
        self.moves = counter(MOVES, registry)
        self.adoptions = counter(ADOPTIONS, registry)
        self._collected = counter(COLLECTED_TOKENS, registry)
        self.request_s = histogram(REQUEST_TIME, registry)
        self.between_tokens: defaultdict[str, Durations] = defaultdict(Durations)
        """By model name."""
        self.arrived = Arrived()
        self.objectives = Objectives()
        self._refusals = counter(REFUSALS, registry)
        self._prompt_tokens = counter(PROMPT_TOKENS, registry)
        self._first_token = histogram(TIME_TO_FIRST_TOKEN, registry)
        timings(INTER_TOKEN, lambda: {(): together([*self.between_tokens.values()])}, registry)
        self._requests = counter(REQUESTS, registry)
        self._stages = histogram(REQUEST_STAGE, registry)
        self._adapters: set[str] = set()
        self._adapter_requests = counter(ADAPTER_REQUESTS, registry)
        self._adapter_tokens = counter(ADAPTER_TOKENS, registry)
        self._tenants: set[str] = set()
        self._tenant_requests = counter(TENANT_REQUESTS, registry)
        self._tenant_refusals = counter(TENANT_REFUSALS, registry)
        self._tenant_tokens = counter(TENANT_TOKENS, registry)
        self._tenant_first_token = histogram(TENANT_FIRST_TOKEN, registry)
        self._tenant_objectives = counter(TENANT_OBJECTIVES, registry)
        self._remote = counter(REMOTE_PREFILL, registry)
        self._local = counter(LOCAL_PREFILL, registry)
        self._migrations = counter(MIGRATIONS, registry)
        self._retries = counter(RETRIES, registry)
        self._predictions = histogram(PREDICTIONS, registry)
        self.shadows = ShadowMetrics(registry)
        self.cascades = CascadeMetrics(registry)
        self.steps_back = counter(STEPS_BACK, registry)
        self._gen_ai = _GenAiMetrics(registry)
        self._vllm = _VllmMetrics(self.between_tokens, registry)

    def placed(self, model: str) -> None:
        """An accepted request has its first workers."""
        self.arrived.placed[model] += 1

    def refused(self, limit: Limit, tenant: Tenant) -> None:
        if limit in FOR_CAPACITY:
            self.arrived.refused += 1
            self._judge(tenant, "first_token", self.objectives.first_token_s, None)
        self._refusals.labels(limit.value).inc()
        self._tenant_refusals.labels(self._label(tenant), limit.value).inc()

    def accepted(self, tenant: Tenant, model: str, prompt_tokens: int) -> None:
        """A request's prompt is encoded and admitted."""
        self.computed(tenant, model, prompt_tokens)
        self.arrived.requests[model] += 1
        self.arrived.prompt_tokens[model] += prompt_tokens

    def computed(self, tenant: Tenant, model: str, prompt_tokens: int) -> None:
        """So many tokens of a request are prefilled, or were computed by an encode worker."""
        self._vllm.prompt_tokens.labels(model).inc(prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._tenant_tokens.labels(self._label(tenant), "prompt").inc(prompt_tokens)

    def adapter_accepted(self, adapter: str, prompt_tokens: int) -> None:
        """The same, of a request that runs with an adapter."""
        self._adapter_tokens.labels(self._of_adapter(adapter), "prompt").inc(prompt_tokens)

    def adapter_over(self, adapter: str, output_tokens: int, error: BaseException | None) -> None:
        """A request that runs with an adapter ended."""
        label = self._of_adapter(adapter)
        self._adapter_tokens.labels(label, "output").inc(output_tokens)
        self._adapter_requests.labels(label, outcome_of(error)).inc()

    def first_token(self, tenant: Tenant, seconds: float) -> None:
        """A client gets its first text, this many seconds after its request arrived."""
        self._first_token.observe(seconds)
        self._tenant_first_token.labels(self._label(tenant)).observe(seconds)

    def collected(self, num_tokens: int, reason: str) -> None:
        """A worker has collected a prefix."""
        self._collected.labels(reason).inc(num_tokens)

    def predicted(self, first_token_s: float, took_s: float, *, remotely: bool) -> None:
        """An attempt's first token arrived, took_s after its start."""
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
        """A request ended: normally, by an error, or because its client left."""
        outcome = outcome_of(error)
        self._requests.labels(outcome).inc()
        self._tenant_requests.labels(self._label(tenant), outcome).inc()

    def judged(
        self,
        tenant: Tenant,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog],
    ) -> None:
        """Holds a request that ended against the objectives. error: None, or a failure that is not
        its client's; refusals are counted by `refused`."""
        if error is not None and any(map(len, logs)):
            return
        first_s = None if error is not None else times.first_token_s
        self._judge(tenant, "first_token", self.objectives.first_token_s, first_s)
        per_token_s = _per_token_s(times, logs)
        if per_token_s is not None:
            limit_s = self.objectives.between_tokens_s
            self._judge(tenant, "between_tokens", limit_s, per_token_s)

    def _judge(self, tenant: Tenant, objective: str, limit_s: float, took_s: float | None) -> None:
        """took_s: None where it never came."""
        if limit_s:
            outcome = "met" if took_s is not None and took_s <= limit_s else "missed"
            self._tenant_objectives.labels(self._label(tenant), objective, outcome).inc()

    def spent(self, tenant: Tenant, times: StageTimes, output_tokens: int) -> None:
        """Records the output tokens and the stage times of an admitted request."""
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
        alias: str = "",
    ) -> None:
        """A request is over, whether it was admitted or not. model: the one that ran it, or "",
        because the client's model name may be any text. logs: of its choices. alias: the name that
        the model was chosen by, if it is the operator's."""
        self._gen_ai.over(request, alias or model, model, error, times, logs)
        if model:
            self._vllm.over(model, error, times, logs)

    def _of_adapter(self, name: str) -> str:
        if name not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                return OTHER_ADAPTERS
            self._adapters.add(name)
        return name

    def _label(self, tenant: Tenant) -> str:
        name = tenant.name
        if name not in self._tenants:
            if not name or len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(name)
        return name


class ShadowMetrics:
    """Requests to shadow models, which no other metric counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = counter(SHADOW_REQUESTS, registry)
        self._first_token = histogram(SHADOW_FIRST_TOKEN, registry)
        self._request = histogram(SHADOW_TIME, registry)
        self._comparisons = counter(SHADOW_COMPARISONS, registry)

    def over(
        self,
        alias: str,
        model: str,
        outcome: str,
        first_token_s: float | None = None,
        took_s: float | None = None,
    ) -> None:
        """One ended, or was not sent. None: it had none, or did not end well."""
        self._requests.labels(alias, model, outcome).inc()
        if first_token_s is not None:
            self._first_token.labels(alias, model).observe(first_token_s)
        if took_s is not None:
            self._request.labels(alias, model).observe(took_s)

    def compared(self, alias: str, model: str, *, equal: bool) -> None:
        self._comparisons.labels(alias, model, "equal" if equal else "different").inc()


class CascadeMetrics:
    """Requests of names with a small and a large model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = counter(CASCADE_ANSWERS, registry)
        self._alone = counter(CASCADE_ALONE, registry)
        self._confidence = histogram(CASCADE_CONFIDENCE, registry)

    def confidence(self, alias: str, value: float) -> None:
        self._confidence.labels(alias).observe(value)

    def answered(self, alias: str, by: str) -> None:
        """by: "small" or "large"."""
        self._answers.labels(alias, by).inc()

    def alone(self, alias: str, error: BatonError) -> None:
        self._alone.labels(alias, outcome_of(error)).inc()


class _VllmMetrics:
    """Requests under vLLM's names. Only routers have them, so that a sum over pods counts each
    once."""

    def __init__(
        self, between_tokens: defaultdict[str, Durations], registry: CollectorRegistry
    ) -> None:
        """between_tokens: times between tokens by model, which are recorded in any case."""
        self.prompt_tokens = counter(metrics.VLLM_PROMPT_TOKENS, registry)
        self._first_token = histogram(metrics.VLLM_FIRST_TOKEN, registry)
        self._request = histogram(metrics.VLLM_REQUEST_TIME, registry)
        self._per_token = histogram(metrics.VLLM_PER_TOKEN, registry)
        self._output_tokens = counter(metrics.VLLM_OUTPUT_TOKENS, registry)
        self._succeeded = counter(metrics.VLLM_SUCCEEDED, registry)
        timings(
            metrics.VLLM_INTER_TOKEN,
            lambda: {(model,): times for model, times in dict(between_tokens).items()},
            registry,
        )

    def over(
        self,
        model: str,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog],
    ) -> None:
        self._output_tokens.labels(model).inc(sum(map(len, logs)))
        if error is not None or not any(map(len, logs)):
            return
        self._request.labels(model).observe(times.total_s)
        self._first_token.labels(model).observe(times.first_token_s)
        per_token_s = _per_token_s(times, logs)
        if per_token_s is not None:
            self._per_token.labels(model).observe(per_token_s)
        for reason in (log.finish_reason for log in logs):
            if reason is not None:
                self._succeeded.labels(model, reason.name.lower()).inc()


class _GenAiMetrics:
    """Requests under the names of OpenTelemetry's GenAI conventions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._duration = histogram(GEN_AI_DURATION, registry)
        self._first_token = histogram(GEN_AI_FIRST_TOKEN, registry)
        self._per_token = histogram(GEN_AI_PER_TOKEN, registry)

    def over(
        self,
        request: Request,
        asked: str,
        model: str,
        error: BaseException | None,
        times: StageTimes,
        logs: Sequence[TokenLog],
    ) -> None:
        labels = (operation_of(request.prompt), tracing.BATON, asked, model)
        self._duration.labels(*labels, error_type(error)).observe(times.total_s)
        if error is not None or not any(map(len, logs)):
            return
        self._first_token.labels(*labels).observe(times.first_token_s)
        per_token_s = _per_token_s(times, logs)
        if per_token_s is not None:
            self._per_token.labels(*labels).observe(per_token_s)


def _per_token_s(times: StageTimes, logs: Sequence[TokenLog]) -> float | None:
    """Returns the mean seconds per token after the first, of the longest choice."""
    longest = max(map(len, logs), default=0)
    return (times.total_s - times.first_token_s) / (longest - 1) if longest > 1 else None


def outcome_of(error: BaseException | None) -> str:
    """Returns the outcome of a request, as metrics name it."""
    if error is None:
        return "finished"
    return error.reason.name.lower() if isinstance(error, BatonError) else "cancelled"


class TenantBlind(Collector):
    """A registry for untrusted readers: all of its metrics except those with a tenant's name."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return (m for m in self._registry.collect() if not m.name.startswith("baton_tenant_"))
