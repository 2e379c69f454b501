"""A fleet for traffic and targets: both pools, their ratio, and what a token costs; asks curves."""

from __future__ import annotations

from dataclasses import dataclass

from baton_loadtest.planner.asked import Margins, Targets, Traffic
from baton_loadtest.planner.curves import DecodeCurve, PrefillCurve
from baton_loadtest.planner.decode_pool import DecodePool, KvRoom, plan_decode
from baton_loadtest.planner.prefill_pool import PrefillPool, handover_s, plan_prefill

HOUR_S = 3600.0
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Fleet:
    """decode_per_prefill: decode workers that keep up with one prefill worker, both as busy as is
    planned. handover_s: of the 95th percentile's prompt, from its first token on; None without a
    link that is known."""

    prefill: PrefillPool
    decode: DecodePool
    decode_per_prefill: float
    handover_s: float | None

    @property
    def workers(self) -> int:
        return self.prefill.workers + self.decode.workers

    def cost_per_million(self, traffic: Traffic, price_per_hour: float) -> tuple[float, float]:
        """Of all tokens, and of output alone with everything charged to it. price_per_hour: of a
        worker."""
        price = self.workers * price_per_hour / HOUR_S * MILLION / traffic.rate
        outputs = traffic.outputs.mean
        return price / (traffic.prompts.mean + outputs), price / outputs


def plan_fleet(
    traffic: Traffic,
    targets: Targets,
    margins: Margins,
    curves: tuple[PrefillCurve, DecodeCurve],
    room: KvRoom,
    wire_position: int,
) -> Fleet:
    """room: of a decode worker. wire_position: bytes of a token's KV as it travels. Raises
    InvalidArgument naming the target that cannot be met, and why."""
    prefilling, decoding = curves
    prefill = plan_prefill(traffic, targets, margins, prefilling, wire_position)
    decode = plan_decode(traffic, targets, margins, decoding, room, prefill.moved_bytes)
    long = round(traffic.prompts.p95)
    return Fleet(
        prefill,
        decode,
        (traffic.outputs.mean - 1) / decode.tokens_per_s / prefill.mean_s if prefill.mean_s else 0,
        handover_s(prefilling, traffic.cached(long), long, wire_position, margins.link)
        if margins.link
        else None,
    )
