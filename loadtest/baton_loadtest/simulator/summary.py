"""The figures of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton_loadtest import report
from baton_loadtest.report import Result
from baton_loadtest.simulator.requests import Record, gap_quantile, merged
from baton_loadtest.simulator.settings import FleetFacts
from baton_loadtest.simulator.simulation import Outcome
from baton_loadtest.simulator.workers import Use


@dataclass(frozen=True, slots=True)
class Target:
    """Limits in seconds for the first token and for the mean time between tokens."""

    first_token_s: float
    token_s: float

    def met(self, record: Record) -> bool:
        first_s = record.first_token_s
        if first_s is None or record.ended is None or record.first_token is None:
            return False
        between = (record.ended - record.first_token) / max(1, record.tokens - 1)
        return first_s <= self.first_token_s and between <= self.token_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Times are in seconds, shares from 0 to 1."""

    requests: int
    answered: int
    refused: dict[str, int]
    """Count by reason."""
    window_s: float
    """From 0 to the last token."""
    first_token_s: dict[float, float]
    """By quantile (QUANTILES), over all answered requests."""
    token_s: dict[float, float]
    """By quantile (QUANTILES), over all answered requests."""
    input_tokens: int
    output_tokens: int
    cached_share: float
    apart_share: float
    moved_tokens: int
    attempts: int
    preemptions: int
    prefill_busy: tuple[float, ...]
    """Share of the window in which each worker ran a step."""
    decode_busy: tuple[float, ...]
    """Share of the window in which each worker ran a step."""
    prefill_blocks: tuple[float, float]
    """Share of the pool in use: mean while a step ran, and maximum."""
    decode_blocks: tuple[float, float]
    """As prefill_blocks."""
    mean_batch: float
    drafts: int
    """Drafts that decode workers computed."""
    saved_steps: int
    """How many more steps sequences would have taken without them."""


QUANTILES = (0.5, 0.9, 0.99)


def summary(facts: FleetFacts, outcome: Outcome) -> Summary:
    records, window_s = outcome.records, outcome.end
    answered = [record for record in records if record.ended is not None]
    waits = [r.first_token_s for r in answered if r.first_token_s is not None]
    gaps = merged(record.gaps for record in answered)
    inputs = sum(record.request.input_tokens for record in answered)
    steps = sum(use.steps for use in outcome.decodes)
    return Summary(
        requests=len(records),
        answered=len(answered),
        refused=dict(Counter(record.refused for record in records if record.refused)),
        window_s=window_s,
        first_token_s={q: report.quantile(waits, q) for q in QUANTILES},
        token_s={q: gap_quantile(gaps, q) for q in QUANTILES},
        input_tokens=inputs,
        output_tokens=sum(record.tokens for record in answered),
        cached_share=_share(sum(record.cached_tokens for record in answered), inputs),
        apart_share=_share(sum(r.prefill is not None for r in answered), len(answered)),
        moved_tokens=sum(record.moved_tokens for record in records),
        attempts=sum(record.attempts for record in records),
        preemptions=outcome.preemptions,
        prefill_busy=tuple(_share(use.busy_s, window_s) for use in outcome.prefills),
        decode_busy=tuple(_share(use.busy_s, window_s) for use in outcome.decodes),
        prefill_blocks=_blocks(outcome.prefills, facts.prefill.num_blocks),
        decode_blocks=_blocks(outcome.decodes, facts.decode.num_blocks),
        mean_batch=_share(sum(use.rows for use in outcome.decodes), steps),
        drafts=sum(use.drafts for use in outcome.decodes),
        saved_steps=sum(use.saved_steps for use in outcome.decodes),
    )


def goodput(records: Iterable[Record], target: Target, window_s: float) -> float:
    """Returns the requests per second that met the target."""
    return _share(sum(target.met(record) for record in records), window_s)


def _blocks(uses: Sequence[Use], num_blocks: int) -> tuple[float, float]:
    busy_s = sum(use.busy_s for use in uses)
    mean = _share(sum(use.block_s for use in uses), busy_s)
    return mean / num_blocks, max((use.peak_blocks for use in uses), default=0) / num_blocks


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def figures(found: Summary) -> list[Result]:
    window_s = found.window_s or 1.0
    results = [
        Result("requests", found.requests, ""),
        Result("answered", found.answered, ""),
        *(Result(f"refused: {why}", count, "") for why, count in sorted(found.refused.items())),
        Result("simulated time", found.window_s, "s"),
        *(Result(f"first token, {_of(q)}", s, "s") for q, s in found.first_token_s.items()),
        *(Result(f"between tokens, {_of(q)}", 1e3 * s, "ms") for q, s in found.token_s.items()),
        Result("prompt tokens", found.input_tokens / window_s, "/s"),
        Result("output tokens", found.output_tokens / window_s, "/s"),
        Result("prompt tokens from a prefix cache", 100 * found.cached_share, "%"),
        Result("requests prefilled apart", 100 * found.apart_share, "%"),
        Result("prompt tokens whose KV was handed over", found.moved_tokens, ""),
        Result("attempts", found.attempts, ""),
        Result("preemptions", found.preemptions, ""),
        Result("sequences of a decode step, mean", found.mean_batch, ""),
        Result("decode busy, mean", 100 * _mean(found.decode_busy), "%"),
        Result("decode busy, most", 100 * max(found.decode_busy, default=0.0), "%"),
        Result("decode blocks in use, mean", 100 * found.decode_blocks[0], "%"),
        Result("decode blocks in use, most", 100 * found.decode_blocks[1], "%"),
    ]
    if found.drafts:
        results += [
            Result("drafts computed", found.drafts, ""),
            Result("steps of sequences saved by drafts", found.saved_steps, ""),
        ]
    if found.prefill_busy:
        results += [
            Result("prefill busy, mean", 100 * _mean(found.prefill_busy), "%"),
            Result("prefill busy, most", 100 * max(found.prefill_busy), "%"),
            Result("prefill blocks in use, mean", 100 * found.prefill_blocks[0], "%"),
            Result("prefill blocks in use, most", 100 * found.prefill_blocks[1], "%"),
        ]
    return results


def _of(quantile: float) -> str:
    return f"p{100 * quantile:g}"


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
