"""`baton bench engine`: Baton's engine against what one would run instead, same requests, one run.

Every contender runs in a process of its own, one at a time, pinned to the same cores, with the same
weights, prompts and answer lengths, greedy, and no end-of-sequence token. A second part compares
exact mode with plain mode, and a single sequence's decoding with the speed of memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from baton_loadtest.bench import shapes
from baton_loadtest.bench.contenders import (
    CONTINUOUS,
    DEADLINE_S,
    EXACT,
    INT8,
    LLAMA,
    PLAIN,
    Ranking,
    compete,
    line_up,
)
from baton_loadtest.bench.process import call, cores, say
from baton_loadtest.bench.workload import Workload
from baton_loadtest.report import Bars, Report, Result, at_most, compared

PROMPT_TOKENS, OUTPUT_TOKENS = (32, 512), (16, 256)
WARM = 4
AGAINST_CONTINUOUS, AGAINST_LLAMA, INT8_AGAINST_FLOAT = 3.0, 1.4, 1.4
OF_BANDWIDTH, EXACT_COST = 0.70, 1.10
BATCHES = (1, 8, 32)


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed when Baton itself cannot run."""
    threads = min(args.threads, cores())
    llama = args.llama_python or (sys.executable if importlib.util.find_spec("llama_cpp") else "")
    if args.peers and not llama:
        say("llama.cpp is left out: name an interpreter that has llama_cpp with --llama-python")
    model = shapes.folder(args.shape)
    settings = shapes.config(model)
    small = args.shape == "tiny"
    workload = Workload.draw(
        args.seed,
        args.requests,
        PROMPT_TOKENS,
        (16, 32) if small else OUTPUT_TOKENS,
        settings["vocab_size"],
    )
    standings = compete(
        line_up(
            model,
            int8=args.quantize == "int8",
            peers=args.peers,
            llama_python=llama if args.peers else "",
        ),
        model,
        workload,
        Workload.draw(args.seed + 1, WARM, (32, 64), (4, 4), settings["vocab_size"]),
        threads=threads,
        rounds=args.rounds,
        seconds=args.seconds,
    )
    modes = call(
        "modes",
        {
            "model": str(model),
            "threads": threads,
            "batches": BATCHES,
            "context": 512,
            "prefill": 128 if small else 1024,
            "chunk": 512,
            "tokens": 16 if small else 64,
            "megabytes": 32 if small else 1024,
        },
        threads=threads,
        deadline_s=DEADLINE_S,
    )
    results = [
        Result("threads of every contender", threads, ""),
        Result("requests", args.requests, ""),
        Result("prompt tokens", workload.prompt_tokens, ""),
        Result("output tokens", workload.output_tokens, ""),
        *_speeds(standings, workload),
        *_goals(standings),
        *_alone(modes, model, settings),
        *_exact(modes),
    ]
    bars = tuple((name, standing.speed) for name, standing in standings.items())
    return Report(results, (Bars(f"{args.requests} requests, {args.shape}", "tokens/s", bars),))


def _speeds(standings: dict[str, Ranking], workload: Workload) -> list[Result]:
    ours = standings[EXACT].tokens
    found = []
    for name, standing in standings.items():
        found.append(Result(f"{name}: output", standing.speed, "tokens/s"))
        found.append(Result(f"{name}: output", standing.cpu_speed, "tokens/CPU-s"))
        if len(standing.tokens) < len(workload.prompts):
            done = float(len(standing.tokens))
            found.append(Result(f"{name}: requests done in its time", done, ""))
        if name != EXACT:
            equal, prefix = agreement(ours, standing.tokens)
            found.append(Result(f"{name}: requests with tokens equal to exact", 100 * equal, "%"))
            if equal < 1:
                found.append(Result(f"{name}: tokens until they differ, mean", prefix, ""))
    return found


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """The share of answers that are equal, and the mean length of their equal beginnings.

    theirs may hold the first few requests only.
    """
    pairs = list(zip(ours, theirs, strict=False))
    equal = sum(a == b for a, b in pairs) / len(pairs)
    prefixes = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
    ]
    return equal, sum(prefixes) / len(pairs)


def _goals(standings: dict[str, Ranking]) -> list[Result]:
    def against(one: str, other: str, goal: float | None) -> list[Result]:
        if one not in standings or other not in standings:
            return []
        name = f"{one} against {other}"
        return [compared(name, standings[one].speed, "tokens/s", standings[other].speed, goal)]

    found = []
    for one in (EXACT, PLAIN):
        found += against(one, CONTINUOUS, AGAINST_CONTINUOUS)
        found += against(one, LLAMA, AGAINST_LLAMA)
    found += against(INT8, PLAIN, INT8_AGAINST_FLOAT)
    return found


def _alone(modes: dict[str, Any], model: Path, settings: dict[str, Any]) -> list[Result]:
    """Batch 1 beside what memory allows: every weight and all KV is read for every token."""
    kv = shapes.kv_bytes(settings) * modes["alone_context"]
    bound = modes["bandwidth"] / (4 * shapes.weights_read(model, settings) + kv)
    found = [Result("read bandwidth", modes["bandwidth"] / 1e9, "GB/s")]
    for mode in ("exact", "not exact"):
        name = f"one sequence, {mode}, against the bound of memory"
        speed = 1 / modes[mode]["alone"]
        found.append(compared(name, speed, "tokens/s", bound, OF_BANDWIDTH))
    return found


def _exact(modes: dict[str, Any]) -> list[Result]:
    if not modes["is_exact"]:
        return [Result("exact mode could be had", 0, "")]
    exact, plain = modes["exact"], modes["not exact"]
    names = {f"decode {batch}": f"step of exact mode, batch {batch}" for batch in BATCHES}
    names["prefill"] = "prefill in exact mode"
    return [
        at_most(name, 1000 * exact[key], "ms", EXACT_COST, 1000 * plain[key])
        for key, name in names.items()
    ]
