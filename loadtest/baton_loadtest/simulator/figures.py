"""Puts a simulated run into figures; simulates nothing."""

from __future__ import annotations

from baton_loadtest.report import Result
from baton_loadtest.simulator.summary import Summary


def figures(found: Summary) -> list[Result]:
    window_s = found.window_s or 1.0
    results = [
        Result("requests", found.requests, ""),
        Result("answered", found.answered, ""),
        *(Result(f"refused: {why}", count, "") for why, count in sorted(found.refused.items())),
        Result("simulated time", found.window_s, "s"),
        *(Result(f"first token, {_name(q)}", s, "s") for q, s in found.first_token_s.items()),
        *(Result(f"between tokens, {_name(q)}", 1e3 * s, "ms") for q, s in found.token_s.items()),
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
    if found.prefill_busy:
        results += [
            Result("prefill busy, mean", 100 * _mean(found.prefill_busy), "%"),
            Result("prefill busy, most", 100 * max(found.prefill_busy), "%"),
            Result("prefill blocks in use, mean", 100 * found.prefill_blocks[0], "%"),
            Result("prefill blocks in use, most", 100 * found.prefill_blocks[1], "%"),
        ]
    return results


def _name(quantile: float) -> str:
    return f"p{100 * quantile:g}"


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0
