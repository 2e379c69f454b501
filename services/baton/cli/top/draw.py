"""Draws a View for a terminal, and writes it as JSON; measures nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.top.view import Overall, PoolView, View

NOTHING = "-"


def document(shown: View) -> dict[str, Any]:
    """Seconds, shares and counts as they are; None where nothing is known."""
    return asdict(shown)


def drawn(shown: View) -> RenderableType:
    """Fits the width it gets: a column that has no room is cut."""
    lines: list[RenderableType] = [_overall(shown.overall), _pools(shown)]
    lines += [Text(f"{url} {why}", style="red") for url, why in sorted(shown.away.items())]
    lines.append(Text(f"over the last {shown.seconds:.0f} s", style="dim"))
    return Group(*lines)


def _overall(told: Overall) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    fields = [
        ("requests/s", _number(told.requests_per_s)),
        ("open", _number(told.open_requests)),
        ("output tokens/s", _number(told.output_tokens_per_s)),
        ("first token p50", _time(told.first_token_p50_s)),
        ("p99", _time(told.first_token_p99_s)),
        ("prefix hits", _share(told.prefix_hit_rate)),
        ("between tokens p50", _time(told.inter_token_p50_s)),
        ("p99", _time(told.inter_token_p99_s)),
        ("hand-over", f"{_bytes(told.handover_bytes_per_s)}/s"),
        ("refusals/s", _number(told.refusals_per_s)),
        ("migrations/s", _number(told.migrations_per_s)),
    ]
    for start in range(0, len(fields), 3):
        cells: list[RenderableType] = []
        for name, value in fields[start : start + 3]:
            cells += [Text(name, style="dim"), Text(value, style="bold")]
        table.add_row(*cells)
    return table


def _pools(shown: View) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pool", no_wrap=True, min_width=11)
    table.add_column("workers")
    for name in ("queue", "tokens", "running", "KV", "tokens/s", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for pool in shown.pools:
        table.add_row(
            pool.role,
            _workers(pool),
            _number(pool.queue),
            _number(pool.waiting_tokens),
            _number(pool.running),
            _share(pool.kv_use),
            _number(pool.tokens_per_s),
            _time(pool.step_s),
        )
    return table


def _workers(pool: PoolView) -> str:
    told = ", ".join(f"{number} {state}" for state, number in pool.workers.items())
    return told or (f"{pool.asked} asked" if pool.asked else NOTHING)


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
