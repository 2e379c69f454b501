"""What a router measures of requests under vLLM's names, for dashboards made for it; knows no
scraper.

On routers alone: whoever adds up pods counts each request once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry

from baton.core.observe.stages import StageTimes
from baton.core.observe.timings import Timings
from baton.core.request.token_log import TokenLog
from baton.rpc import aliases
from baton.rpc.metrics import REGISTRY, counter, histogram, timings


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
