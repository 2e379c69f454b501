"""What a router measures of requests under OpenTelemetry's GenAI names; knows no scraper.

A request is told once, when it is over. Prometheus writes dots as underscores and a unit behind the
name. The conventions still change: every name of them that is a metric's is in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from baton.core.observe.stages import StageTimes
from baton.core.request.request import ChatPrompt, Request
from baton.core.request.token_log import TokenLog
from baton.rpc import trace_names as names
from baton.rpc.metrics import REGISTRY, Spec, histogram
from baton.rpc.tracing import error_type

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
