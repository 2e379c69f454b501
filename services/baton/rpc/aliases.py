"""Baton's metrics under vLLM's names, for what knows only these.

An endpoint picker of the Gateway API Inference Extension reads them, and so do dashboards and
autoscalers that were made for vLLM. There is no `vllm:lora_requests_info`: there are no adapters.
"""

from __future__ import annotations

from baton.core.observe.timings import BOUNDS_S
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

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
FIRST_TOKEN = Spec(
    "vllm:time_to_first_token_seconds", "From arrival to the first token.", ("model_name",),
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
     80, 160),
)  # fmt: skip
INTER_TOKEN = Spec(
    "vllm:inter_token_latency_seconds", "Between tokens of a choice.", ("model_name",), BOUNDS_S
)
PER_TOKEN = Spec(
    "vllm:request_time_per_output_token_seconds",
    "Mean time of each token behind the first of a request.",
    ("model_name",),
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_TIME = Spec(
    "vllm:e2e_request_latency_seconds", "From arrival to the last token.", ("model_name",),
    _REQUEST_S,
)  # fmt: skip
PROMPT_TOKENS = Spec(
    "vllm:prompt_tokens_total", "Prompt tokens of accepted requests.", ("model_name",)
)
OUTPUT_TOKENS = Spec(
    "vllm:generation_tokens_total", "Output tokens of requests that ended.", ("model_name",)
)
SUCCEEDED = Spec(
    "vllm:request_success_total",
    "Choices that ended well, by why they ended.",
    ("model_name", "finished_reason"),
)
