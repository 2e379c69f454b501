"""Baton's gauges under vLLM's names, for what knows only these; knows none of the values.

An endpoint picker of the Gateway API Inference Extension reads them, and so do dashboards and
autoscalers that were made for vLLM. There is no `vllm:lora_requests_info`: there are no adapters.
"""

from __future__ import annotations

from baton.rpc.metrics import Spec

RUNNING = Spec("vllm:num_requests_running", "Requests that are being computed.", ("model_name",))
WAITING = Spec("vllm:num_requests_waiting", "Requests that wait to be computed.", ("model_name",))
KV_USAGE = Spec(
    "vllm:kv_cache_usage_perc", "Share of the KV blocks that are in use, from 0 to 1.",
    ("model_name",),
)  # fmt: skip
CACHE_CONFIG = Spec(
    "vllm:cache_config_info",
    "Always 1. How many KV blocks there are, and how many positions each has.",
    ("model_name", "block_size", "num_gpu_blocks"),
)
