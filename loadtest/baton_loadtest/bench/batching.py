"""`baton bench batching`: continuous against static batching of the same requests on one engine.

Static batching has no padding here, since Baton's steps never have: its only loss is that a batch
waits for its longest answer.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import mean
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engine import OUTPUT_TOKENS, PROMPT_TOKENS, STEP_TOKENS
from baton_loadtest.bench.options import DEVICE, engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, compared

PLOTS = True
OPTIONS = (
    *engine(threads=1),
    DEVICE,
    option("--seed", 42),
    option("--requests", 32),
    option("--batch", 8, "sequences at once"),
)

DEADLINE_S = 600.0


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the engine cannot run."""
    threads = min(args.threads, len(cores()))
    model = engines.folder(args.shape)
    vocab = engines.config_of(model)["vocab_size"]
    requests = engines.EngineRequests.draw(
        args.seed, args.requests, PROMPT_TOKENS, OUTPUT_TOKENS, vocab
    )
    job = {
        "model": str(model),
        "threads": threads,
        "device": args.device,
        "batch": args.batch,
        "requests": asdict(requests),
    }
    served = call(run, job, threads=threads, deadline_s=DEADLINE_S)
    ours, static = served["continuous"], served["static"]
    equal = sum(a == b for a, b in zip(ours["tokens"], static["tokens"], strict=True))
    speeds = [requests.output_tokens / one["seconds"] for one in (ours, static)]
    occupied = [100 * mean(one["occupancy"]) / args.batch for one in (ours, static)]
    results = [
        Result("sequences at once", args.batch, ""),
        compared("continuous against static: output", speeds[0], "tokens/s", speeds[1]),
        compared("steps", len(ours["occupancy"]), "", len(static["occupancy"])),
        compared("batch places that get a token, mean", occupied[0], "%", occupied[1]),
        Result("requests with equal tokens", 100 * equal / args.requests, "%"),
    ]
    lines = tuple(
        Line(name, range(len(served[name]["occupancy"])), served[name]["occupancy"])
        for name in ("static", "continuous")
    )
    title = f"{args.requests} requests, {args.batch} at once"
    return Report(results, (Chart(title, "step", "sequences that get a token", lines),))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, device, batch, requests. Returns a `Served` for each way."""
    requests = engines.from_json(job["requests"])
    size, count = job["batch"], len(requests.prompts)
    runner = engines.open_runner(
        job["model"], job["threads"], requests.positions(size), device=job["device"]
    )
    ways = {
        "continuous": None,
        "static": [range(i, min(i + size, count)) for i in range(0, count, size)],
    }
    found = {}
    for name, batches in ways.items():
        loop = engines.engine_loop(runner, engines.policy(size, STEP_TOKENS))
        found[name] = asdict(engines.serve(loop, requests, batches))
        progress(f"{name}: {found[name]['seconds']:.1f} s")
    return found
