"""A fleet's figures, in words and units for a person and for a file; plans nothing."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from baton_loadtest.planner.asked import Margins, Traffic
from baton_loadtest.planner.curves import (
    DecodeCurve,
    DecodeRoofline,
    PrefillCurve,
    PrefillRoofline,
    duration,
)
from baton_loadtest.planner.facts import ModelFacts
from baton_loadtest.planner.fleet import Fleet
from baton_loadtest.planner.gpus import GB
from baton_loadtest.report import Result, number

_KIB = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """group: with the name it tells a figure from all others of the plan."""

    group: str
    name: str
    value: float
    unit: str = ""
    note: str = ""

    @property
    def result(self) -> Result:
        return Result(f"{self.group}: {self.name}", self.value, self.unit)


Figures = dict[str, list[Figure]]


def figures(
    fleet: Fleet,
    traffic: Traffic,
    margins: Margins,
    curves: tuple[PrefillCurve, DecodeCurve],
    facts: ModelFacts,
    price_per_hour: float | None,
) -> Figures:
    """By group, in the order in which they are read."""
    found = [
        *_model(facts),
        *_prefill(fleet, traffic, curves[0]),
        *_decode(fleet, curves[1]),
        *_both(fleet, traffic, margins, price_per_hour),
    ]
    groups: Figures = {}
    for figure in found:
        groups.setdefault(figure.group, []).append(figure)
    return groups


def show(console: Console, found: Figures) -> None:
    width = max(len(figure.name) for group in found.values() for figure in group)
    for group, of_it in found.items():
        console.print(f"\n{group}", style="bold")
        for figure in of_it:
            value = f"{number(figure.value):>10} {figure.unit:<10}"
            console.print(f"  {figure.name:<{width}} {value} {figure.note}".rstrip(), markup=False)


def _model(facts: ModelFacts) -> list[Figure]:
    group = "model"
    active = facts.active + facts.head
    return [
        Figure(group, "weights", facts.weights / GB, "GB", facts.dtype),
        Figure(group, "parameters at work", active / GB, "10^9", "for each token"),
        Figure(group, "KV of a token", facts.kv_position / _KIB, "KiB"),
    ]


def _prefill(fleet: Fleet, traffic: Traffic, curve: PrefillCurve) -> list[Figure]:
    group, pool = "prefill", fleet.prefill
    mean, long = round(traffic.prompts.mean), round(traffic.prompts.p95)
    bound = ""
    if isinstance(curve, PrefillRoofline):
        bound = f", {curve.bound(traffic.cached(mean), mean)}-bound"
    return [
        Figure(group, "a prompt", 1000 * pool.mean_s, "ms", f"{curve.source}, mean{bound}"),
        Figure(group, "a long prompt", 1000 * pool.long_s, "ms", f"{long} tokens, alone"),
        Figure(group, "of a worker", pool.tokens_per_s, "tokens/s", "computed, always busy"),
        Figure(group, "workers", pool.workers, "", f"decided by {pool.decided_by}"),
        Figure(group, "busy", 100 * pool.load / pool.workers, "%", "of the time"),
        Figure(
            group, "first token", 1000 * pool.first_token_s, "ms",
            f"95 of 100 requests; {duration(pool.wait_s)} of it waiting",
        ),
    ]  # fmt: skip


def _decode(fleet: Fleet, curve: DecodeCurve) -> list[Figure]:
    group, pool = "decode", fleet.decode
    bound = ""
    if isinstance(curve, DecodeRoofline):
        bound = f", {curve.bound(pool.batch, pool.context)}-bound"
    return [
        Figure(group, "sequences that fit", pool.fits, "", f"of {pool.grown:.0f} tokens"),
        Figure(group, "sequences in time", pool.in_time, "", "for the target between tokens"),
        Figure(group, "batch", pool.batch, "", f"bounded by {pool.limited_by}"),
        Figure(group, "a full step", 1000 * pool.full_step_s, "ms", f"{curve.source}{bound}"),
        Figure(group, "of a worker", pool.tokens_per_s, "tokens/s", "at that batch"),
        Figure(group, "workers", pool.workers, "", f"decided by {pool.decided_by}"),
        Figure(group, "running", pool.running, "sequences", "of a worker, on average"),
        Figure(group, "between tokens", 1000 * pool.step_s, "ms", "on average"),
    ]


def _both(
    fleet: Fleet, traffic: Traffic, margins: Margins, price_per_hour: float | None
) -> list[Figure]:
    group, prefill, decode = "both", fleet.prefill, fleet.decode
    found = [
        Figure(
            group, "decode for each prefill", fleet.decode_per_prefill, "workers",
            "when all are equally busy",
        ),
        Figure(group, "KV of a request", prefill.moved_bytes / 1e6, "MB", "mean, without cached"),
        Figure(group, "KV out of prefill", prefill.sent_rate / GB, "GB/s", "a worker, on average"),
        Figure(
            group, "while it computes", prefill.moving_rate / GB, "GB/s", "for a link to keep up",
        ),
        Figure(group, "KV into decode", decode.received_rate / GB, "GB/s", "a worker, on average"),
    ]  # fmt: skip
    if fleet.handover_s is not None:
        link = f"a long prompt's, after its first token, at {margins.link / GB:.3g} GB/s"
        found.append(Figure(group, "rest of a hand-over", 1000 * fleet.handover_s, "ms", link))
    if price_per_hour is not None:
        every, output = fleet.cost_per_million(traffic, price_per_hour)
        hour = f"{fleet.workers} GPUs for {fleet.workers * price_per_hour:.2f} an hour"
        found += [
            Figure(group, "a million tokens", every, "", f"prompts' and answers'; {hour}"),
            Figure(group, "a million of answers", output, "", "with all charged to them"),
        ]
    return found
