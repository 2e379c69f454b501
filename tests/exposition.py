"""What every process's /metrics must be like, checked without promtool; asks no process.

The rules are those of promtool's lint, and one that it has not: a label has few values, and which
ones is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from batonlm.core.admission.tenant_budgets import Limit
from batonlm.core.errors import Reason
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.request import FinishReason
from batonlm.router.request.response_store import Dropped
from batonlm.router.workers.fleet import STATES

ROLES = ("router", "tokenizer", "prefill", "decode", "detokenizer")
_OUTCOMES = {
    "finished", "cancelled", *(reason.name.lower() for reason in Reason),  # of requests
    "completed", "full", "failed",  # of hand-overs
    "cached", "gone", "busy", "incompatible", "late",  # of prefixes that were collected or not
    "hit", "miss", "ok", "moved", "refused",
    "met", "missed",  # of objectives
    "dropped", "equal", "different",  # of shadow requests
    "kept", "adopted", "expired", "none",  # of sequences without a router
}  # fmt: skip
_HANDOVER_STAGES = {
    "open_wait", "grant_wait", "buffer_wait", "pack", "seal", "confirm_wait",
    "meet", "announce_wait", "reserve", "read", "verify", "unpack", "last_chunk",
}  # fmt: skip
_WORKER_STAGES = {"prefill_queue", "prefill", "local_prefill", "kv_wait"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

LABELS: dict[str, set[str] | re.Pattern[str]] = {
    # Of the operator's file.
    "alias": re.compile(r"[\w./:-]{1,200}"),
    "by": {"small", "large"},
    # One that was loaded, or none: never what a client asked for.
    "adapter": re.compile(r"(?:[\w./-]{1,128})?"),
    "error_type": {"", *(reason.name.lower() for reason in Reason)},
    "face": {"grpc", "http"},
    "gen_ai_operation_name": {"chat", "text_completion"},
    "gen_ai_provider_name": {"baton"},
    # A model that runs here, or none: never what a client asked for.
    "gen_ai_request_model": re.compile(r"(?:[\w./-]{1,128})?"),
    "gen_ai_response_model": re.compile(r"(?:[\w./-]{1,128})?"),
    "kind": {
        *("blocks", "swap_blocks", "sequences", "buffers", "handovers", "farewells", "offers"),
        *("streams", "tasks", "prefix_offers"),  # of what may leak on a worker
        *(
            "granted_requests",
            "granted_tokens",
            "input_bytes",
            "unplaced_tokens",
            "waiting",
            "window_tokens",
        ),
        *("computing_tokens", "kv_positions", "placed_sequences", "placed_tokens", "suspects"),
        *("swap_host", "swap_disk", "recompute"),  # of preemptions
        *("announcement", "header", "digest"),  # of what did not verify
        *("decode", "detokenizer"),  # of streams
        *("prompt", "output"),  # of tokens
    },
    "objective": {"first_token", "between_tokens"},
    "outcome": _OUTCOMES,
    "part": {
        *("import", "tokenizer", "discovery", "workers", "engine", "ring", "config"),
        *("weights", "model", "warm_up", "probe"),
    },
    "path": {"self", "peer"},
    "place": {"host", "disk"},
    "prefill": {"local", "remote"},
    "reason": {
        *(limit.value for limit in Limit),
        *(reason.name.lower() for reason in Reason),
        *("gone", "differs"),  # of adoptions
        *(reason.value for reason in Dropped),
    },
    "ring": {"sender", "receiver"},
    "role": {*ROLES, "encode"},
    "side": {"sender", "receiver"},
    # Of a sequence's KV; and the role of a worker whose prefix cache it came from.
    "source": {"local", "handover", "moved", "adopted", "cache", "prefill", "decode"},
    "stage": {*StageTimes().spent(), *_HANDOVER_STAGES, *_WORKER_STAGES},
    "state": {
        *("free", "used", "orphaned", "waiting", "running", *STATES),
    },
    # Names of the file of API keys, at most `MAX_TENANTS`, and one for all others.
    "tenant": re.compile(_NAME.pattern + r"|\(other\)"),
    "tier": {"host", "disk", "store"},
    "version": re.compile(r"[0-9][\w.+]*"),
    # vLLM's: of what a worker is.
    "finished_reason": {reason.name.lower() for reason in FinishReason},
    "model": re.compile(r"[\w./-]{1,128}"),
    "model_name": re.compile(r"[\w./-]{1,128}"),
    "block_size": re.compile(r"\d+"),
    "num_gpu_blocks": re.compile(r"\d+"),
}
"""Every label of every metric, and what values it may have."""

_NO_BASE_UNIT = re.compile(r"_(?:ms|us|milliseconds|minutes|hours|kib|mib|gib|percent|megabytes)\b")


def faults(text: str) -> list[str]:
    """One sentence for each thing that is wrong; none of what is as it should be."""
    return [f"{family.name}: {fault}" for family in _families(text) for fault in _of(family)]


def metrics(text: str) -> set[str]:
    """By the names that their TYPE lines have."""
    return set(re.findall(r"^# TYPE (\S+) ", text, re.M))


def _families(text: str) -> Iterator[Metric]:
    helped = set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    for name in re.findall(r"^# TYPE (\S+) ", text, re.M):
        assert name in helped, f"{name} has no HELP"
    return iter(text_string_to_metric_families(text))


def _of(family: Metric) -> Iterator[str]:
    if family.type == "unknown":
        yield "has no TYPE"
    if family.type == "counter" and not all(s.name.endswith("_total") for s in family.samples):
        yield "is a counter and does not end in _total"
    if family.type != "counter" and family.name.endswith("_total"):
        yield f"is a {family.type} and ends in _total"
    if family.type != "histogram" and family.name.endswith(("_bucket", "_count", "_sum")):
        yield "is named like a part of a histogram"
    if _NO_BASE_UNIT.search(family.name):
        yield "is not in a base unit"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family.name):
        yield "is not named in snake case"
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and not _known(label, value):
                yield f"{label}={value!r} is not written down"


def _known(label: str, value: str) -> bool:
    allowed = LABELS.get(label, set())
    return value in allowed if isinstance(allowed, set) else bool(allowed.fullmatch(value))
