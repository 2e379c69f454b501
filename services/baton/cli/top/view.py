"""What `baton top` shows, as plain values; reads nothing and draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.cli.top.window import STARTED, Window, quantile

ROLES = ("router", "tokenizer", "prefill", "decode", "detokenizer")

_TOKENS = {
    "tokenizer": "baton_encoded_tokens_total",
    "prefill": "baton_prefill_tokens_total",
    "decode": "baton_decode_tokens_total",
}
NAMES = frozenset(
    {
        *_TOKENS.values(), STARTED,
        "baton_requests_total", "baton_requests_open", "baton_queued_requests",
        "baton_queued_tokens", "baton_time_to_first_token_seconds_bucket",
        "baton_inter_token_seconds_bucket", "baton_kv_bytes_total", "baton_refusals_total",
        "baton_migrations_total", "baton_workers", "baton_cached_tokens_total", "baton_blocks",
        "baton_sequences", "baton_waiting_tokens", "baton_step_seconds_sum",
        "baton_step_seconds_count",
    }
)  # fmt: skip
"""All that is looked at: the rest need not be kept."""

_STATES = ("serving", "starting", "draining", "kv_only", "silent", "gone")


@dataclass(frozen=True, slots=True)
class PoolView:
    """One role. None: it has no such thing, or nobody who could tell was asked.

    workers: how many are in each state that any is in, as routers see them. asked: whose metrics
    were read. queue, running: sequences, of routers requests. waiting_tokens: prompt tokens not yet
    computed. kv_use: share of the blocks. step_s: mean of the last seconds.
    """

    role: str
    workers: dict[str, int]
    asked: int
    queue: float | None
    waiting_tokens: float | None
    running: float | None
    kv_use: float | None
    tokens_per_s: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True)
class Overall:
    """What clients see. None: nothing was measured in the last seconds, or nobody was asked."""

    requests_per_s: float
    open_requests: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    output_tokens_per_s: float | None
    handover_bytes_per_s: float
    prefix_hit_rate: float | None
    refusals_per_s: float
    migrations_per_s: float


@dataclass(frozen=True, slots=True)
class View:
    """seconds: that rates and quantiles are of. away: why nothing is known of a process, by its
    address."""

    seconds: float
    overall: Overall
    pools: tuple[PoolView, ...]
    away: dict[str, str]


def view(windows: Mapping[str, Sequence[Window]], away: Mapping[str, str]) -> View:
    """windows: of the processes that told something just now, by role."""
    routers = windows.get("router", ())
    every = [window for found in windows.values() for window in found]
    return View(
        max((window.seconds for window in every), default=0.0),
        _overall(windows),
        tuple(_pool(role, windows.get(role, ()), routers) for role in ROLES),
        dict(away),
    )


def _overall(windows: Mapping[str, Sequence[Window]]) -> Overall:
    routers = windows.get("router", ())
    engines = [*windows.get("prefill", ()), *windows.get("decode", ())]
    first = [w.buckets("baton_time_to_first_token_seconds") for w in routers]
    between = [w.buckets("baton_inter_token_seconds") for w in routers]
    found = _increase(engines, "baton_cached_tokens_total")
    looked_up = found + _increase(engines, "baton_prefill_tokens_total")
    decodes = windows.get("decode", ())
    return Overall(
        requests_per_s=_rate(routers, "baton_requests_total"),
        open_requests=_value(routers, "baton_requests_open"),
        first_token_p50_s=quantile(first, 0.5),
        first_token_p99_s=quantile(first, 0.99),
        inter_token_p50_s=quantile(between, 0.5),
        inter_token_p99_s=quantile(between, 0.99),
        output_tokens_per_s=_rate(decodes, _TOKENS["decode"]) if decodes else None,
        handover_bytes_per_s=_rate(routers, "baton_kv_bytes_total"),
        prefix_hit_rate=found / looked_up if looked_up else None,
        refusals_per_s=_rate(routers, "baton_refusals_total"),
        migrations_per_s=_rate(routers, "baton_migrations_total"),
    )


def _pool(role: str, asked: Sequence[Window], routers: Sequence[Window]) -> PoolView:
    if role == "router":
        states = {"serving": len(asked)} if asked else {}
    else:
        # Each router sees all workers, and one that has just begun sees fewer.
        seen = {
            state: max(
                (
                    int(w.value("baton_workers", f'role="{role}"', f'state="{state}"'))
                    for w in routers
                ),
                default=0,
            )
            for state in _STATES
        }
        states = {state: number for state, number in seen.items() if number}
    if not asked:
        return PoolView(role, states, 0, None, None, None, None, None, None)
    if role == "router":
        queue = _value(asked, "baton_queued_requests")
        running = _value(asked, "baton_requests_open") - queue
        waiting_tokens: float | None = _value(asked, "baton_queued_tokens")
    else:
        queue = _value(asked, "baton_sequences", 'state="waiting"')
        running = _value(asked, "baton_sequences", 'state="running"')
        waiting_tokens = (
            _value(asked, "baton_waiting_tokens") if role in ("prefill", "decode") else None
        )
    blocks = _value(asked, "baton_blocks")
    steps = _increase(asked, "baton_step_seconds_count")
    return PoolView(
        role,
        states,
        len(asked),
        queue,
        waiting_tokens,
        running,
        _value(asked, "baton_blocks", 'state="used"') / blocks if blocks else None,
        _rate(asked, _TOKENS[role]) if role in _TOKENS else None,
        _increase(asked, "baton_step_seconds_sum") / steps if steps else None,
    )


def _value(windows: Sequence[Window], name: str, *labels: str) -> float:
    return sum(window.value(name, *labels) for window in windows)


def _rate(windows: Sequence[Window], name: str) -> float:
    return sum(window.rate(name) for window in windows)


def _increase(windows: Sequence[Window], name: str) -> float:
    return sum(window.increase(name) for window in windows)
