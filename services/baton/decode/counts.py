"""What a decode worker counts of its attempts; knows neither engine nor routers."""

from __future__ import annotations

from baton.decode.begin import Running
from baton.rpc import metrics

DECODED = metrics.counter(metrics.DECODE_TOKENS)
PREFILLED = metrics.counter(metrics.PREFILL_TOKENS)
CACHED = metrics.counter(metrics.CACHED_TOKENS)
KV_SOURCE = metrics.counter(metrics.KV_SOURCE)
STAGE_TIME = metrics.histogram(metrics.STAGE_TIME)


def count_kv(running: Running, cached_tokens: int, wait_s: float) -> None:
    """An attempt's KV is complete, so long after it began."""
    if running.ticket is None:
        source, stage = "local", "local_prefill"
        CACHED.inc(cached_tokens)
        PREFILLED.inc(len(running.attempt.token_ids) - cached_tokens)
    else:
        given = "moved" if running.ticket.sender.role == "decode" else "handover"
        source, stage = given if running.received_bytes else "cache", "kv_wait"
    KV_SOURCE.labels(source).inc()
    STAGE_TIME.labels(stage).observe(wait_s)
