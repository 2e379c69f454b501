"""`baton bench kv`: the cost of a hand-over, compared with the transport alone and with a copy.

There are three levels for each size: from buffer to buffer, verified; from pool to pool; and the
whole hand-over. Further figures: the cost of the digest, how much of a hand-over overlaps with
prefill, and what a prefix that decode already has saves. The sender, with its engine, is pinned to
one core and the receiver to another.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.kv_moves import NO_DIGEST, run_moves
from baton_loadtest.bench.kv_overlap import run_overlap
from baton_loadtest.bench.options import engine, option, values
from baton_loadtest.launch import call, cores, pinned
from baton_loadtest.report import Chart, Line, Report, Result, at_most, compared
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import KvLayout
from batonlm.engine.config import MIB
from batonlm.transfer import nixl
from batonlm.transfer.kv_chunk import POLY, XXH3
from batonlm.worker.staging import BUFFER_BYTES, NUM_BUFFERS

PLOTS = True
OPTIONS = (
    *engine(threads=1),
    option("--sizes", (1, 2, 4, 8, 16, 32, 64), "megabytes"),
    option(
        "--transports",
        ("nixl", "loopback"),
        "nixl, loopback; the first one also for digests and for hiding",
        type=values(str, ("nixl", "loopback")),
    ),
    option("--prompt-tokens", 4096),
    option("--chunks", (512, 256)),
    option("--rounds", 3, "prompts of each chunk size"),
    option("--buffers", NUM_BUFFERS, "staging buffers of each side"),
    option("--buffer-mib", BUFFER_BYTES // MIB, "size of one"),
)

DEADLINE_S = 300.0
OF_RAW = 0.8
OF_PARTS = 1.25
HIDDEN = {512: 80.0, 256: 90.0}
"""By chunk size, the minimum percent of a hand-over of 4096 tokens that overlaps with prefill."""

HIDDEN_PROMPT = 4096

KvTimes = dict[str, dict[str, float]]
"""By size, as returned by `run_moves`."""


def measure(args: argparse.Namespace) -> Report:
    """Raises InvalidArgument if this machine or model is unsuitable, and ContenderFailed."""
    if "nixl" in args.transports and not nixl.available():
        raise InvalidArgument("nixl is not installed", field="transports")
    model = engines.folder(args.shape)
    config = engines.config_of(model)
    if args.prompt_tokens >= config["max_position_embeddings"]:
        raise InvalidArgument("is more than the model has positions", field="prompt_tokens")
    # `call` pins a job to the first core.
    own_core, sender_core = (cores()[0], cores()[-1]) if pinned(0) else (None, None)
    size = engines.head_size(config)
    layout = KvLayout(
        model_digest="00" * 32,
        dtype="float32",
        num_layers=config["num_hidden_layers"],
        num_kv_heads=engines.kv_heads(config),
        key_size=size,
        value_size=size,
    )
    rings = {
        "num_buffers": args.buffers,
        "buffer_bytes": args.buffer_mib * MIB,
        "sender_core": sender_core,
    }

    def moves(transport: str, digest: str, sizes: Iterable[float]) -> KvTimes:
        job = {"transport": transport, "layout": asdict(layout), "sizes": sizes, "digest": digest}
        found: KvTimes = call(run_moves, {**job, **rings}, threads=1, deadline_s=DEADLINE_S)
        return found

    results = [
        Result("buffers of each side", args.buffers, ""),
        Result("size of a buffer", args.buffer_mib, "MiB"),
    ]
    if own_core is not None and sender_core is not None:
        results[:0] = [
            Result("core of the sender and its engine", sender_core, ""),
            Result("core of everything else", own_core, ""),
        ]
    charts = []
    for transport in args.transports:
        found = moves(transport, XXH3, args.sizes)
        results += _levels(transport, found)
        charts.append(_chart(transport, found))
    first, largest = args.transports[0], max(args.sizes)
    digests = {digest: moves(first, digest, [largest]) for digest in (XXH3, POLY, NO_DIGEST)}
    results += _digests(str(largest), digests)
    for chunk in args.chunks:
        job = {
            "model": str(model),
            "vocab": config["vocab_size"],
            "threads": 1,
            "prompt": args.prompt_tokens,
            "chunk": chunk,
            "rounds": args.rounds,
            "seed": args.seed,
            "transport": first,
            "digest": XXH3,
            **rings,
        }
        overlap = call(run_overlap, job, threads=1, deadline_s=DEADLINE_S)
        results += _overlap(args.prompt_tokens, chunk, overlap)
    return Report(results, tuple(charts))


def _levels(transport: str, found: KvTimes) -> list[Result]:
    results = []
    for size, times in found.items():
        name, moved = f"{transport}, {size} MB", times["bytes"]
        # One message each way before the first KV chunk, in addition to an empty hand-over.
        parts = sum(times[part] for part in ("pack", "seal", "raw", "verify", "unpack"))
        parts += 2 * times["nothing"]
        results += [
            compared(f"{name}: raw against memcpy", *_speeds(moved, times, "raw", "memcpy")),
            compared(
                f"{name}: buffer to buffer, verified, against raw",
                *_speeds(moved, times, "buffers", "raw"),
                OF_RAW,
            ),
            at_most(
                f"{name}: pool to pool against the sum of its parts",
                *(1000 * times["pools"], "ms", OF_PARTS, 1000 * parts),
            ),
            compared(f"{name}: pool to pool against raw", *_speeds(moved, times, "pools", "raw")),
            Result(f"{name}: whole hand-over", 1000 * times["whole"], "ms"),
            Result(
                f"{name}: whole hand-over of peers that have not met", 1000 * times["first"], "ms"
            ),
        ]
    return results


def _speeds(
    moved: float, times: dict[str, float], one: str, other: str
) -> tuple[float, str, float]:
    return moved / times[one] / 1e9, "GB/s", moved / times[other] / 1e9


def _digests(size: str, digests: dict[str, KvTimes]) -> list[Result]:
    none = digests[NO_DIGEST][size]
    results = []
    for digest in (XXH3, POLY):
        times = digests[digest][size]
        speed = 2 * times["bytes"] / (times["seal"] + times["verify"]) / 1e9
        results.append(Result(f"{digest}: seal and verify", speed, "GB/s"))
        for level, name in (("buffers", "buffer to buffer"), ("pools", "pool to pool")):
            cost = 100 * (1 - none[level] / times[level])
            results.append(Result(f"{digest}: share of {size} MB {name}", cost, "%"))
    return results


def _overlap(prompt: int, chunk: int, found: dict[str, Any]) -> list[Result]:
    """hidden: 1 - (last chunk's end to last byte received) / (the same without overlap)."""

    def typical(kind: str, figure: str) -> float:
        return float(median(each[figure] for each in found[kind]))

    name = f"{prompt} tokens in chunks of {chunk}"
    behind, alone = typical("behind", "landed_s"), typical("alone", "landed_s")
    hidden = 100 * (1 - behind / alone)
    goal = HIDDEN.get(chunk) if prompt == HIDDEN_PROMPT else None
    met = None if goal is None else hidden >= goal
    half, whole = typical("half", "bytes"), typical("alone", "bytes")
    return [
        Result(f"{name}: bytes handed over", whole / 1e6, "MB"),
        Result(f"{name}: hand-over, nothing hidden", 1000 * alone, "ms"),
        Result(f"{name}: what is left after the last chunk", 1000 * behind, "ms"),
        Result(f"{name}: hidden behind prefill", hidden, "%", goal=goal, met=met),
        Result(f"{name}: bound of what can be hidden", 100 * (1 - chunk / prompt), "%"),
        Result(
            f"{name}: last chunk to first decode step",
            1000 * typical("behind", "first_step_s"),
            "ms",
        ),
        compared(f"{name}: bytes when decode holds the first half", half / 1e6, "MB", whole / 1e6),
        compared(
            f"{name}: time when decode holds the first half",
            *(1000 * typical("half", "landed_s"), "ms", 1000 * alone),
        ),
    ]


def _chart(transport: str, found: KvTimes) -> Chart:
    sizes = [float(size) for size in found]
    levels = (
        ("memcpy", "memcpy"),
        ("raw", "raw"),
        ("buffers", "buffer to buffer, verified"),
        ("pools", "pool to pool"),
        ("whole", "whole hand-over"),
    )
    lines = tuple(
        Line(name, sizes, [times["bytes"] / times[level] / 1e9 for times in found.values()])
        for level, name in levels
    )
    return Chart(f"hand-over, {transport}", "MB", "GB/s", lines, log=True)
