"""`baton bench batching`: continuous against static batching of the same requests on one engine.

Static batching here pads nothing, since Baton's steps never do: what it loses is only that a batch
waits for its longest answer.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import mean
from typing import Any

from baton_loadtest.bench import shapes
from baton_loadtest.bench.child import progress
from baton_loadtest.bench.engine import OUTPUT_TOKENS, PROMPT_TOKENS
from baton_loadtest.bench.process import call, cores
from baton_loadtest.bench.serving import open_loop, open_runner, policy, positions_for, serve
from baton_loadtest.bench.workload import Workload
from baton_loadtest.report import Chart, Line, Report, Result, compared

STEP_TOKENS = 512
DEADLINE_S = 600.0


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed when the engine cannot run."""
    threads = min(args.threads, cores())
    model = shapes.folder(args.shape)
    vocab = shapes.config(model)["vocab_size"]
    workload = Workload.draw(args.seed, args.requests, PROMPT_TOKENS, OUTPUT_TOKENS, vocab)
    job = {
        "model": str(model),
        "threads": threads,
        "device": args.device,
        "batch": args.batch,
        "workload": asdict(workload),
    }
    served = call("batching", job, threads=threads, deadline_s=DEADLINE_S)
    ours, static = served["continuous"], served["static"]
    equal = sum(a == b for a, b in zip(ours["tokens"], static["tokens"], strict=True))

    def speed(one: dict[str, Any]) -> float:
        return workload.output_tokens / float(one["seconds"])

    def occupied(one: dict[str, Any]) -> float:
        sequences: list[int] = one["occupancy"]
        return 100 * mean(sequences) / int(args.batch)

    results = [
        Result("sequences at once", args.batch, ""),
        compared("continuous against static: output", speed(ours), "tokens/s", speed(static)),
        compared("steps", len(ours["occupancy"]), "", len(static["occupancy"])),
        compared("batch places that get a token, mean", occupied(ours), "%", occupied(static)),
        Result("requests with equal tokens", 100 * equal / args.requests, "%"),
    ]
    lines = tuple(
        Line(name, range(len(served[name]["occupancy"])), served[name]["occupancy"])
        for name in ("static", "continuous")
    )
    title = f"{args.requests} requests, {args.batch} at once"
    return Report(results, (Chart(title, "step", "sequences that get a token", lines),))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, device, batch, workload. Returns a `Served` for each way."""
    workload = Workload.from_json(job["workload"])
    size, requests = job["batch"], len(workload.prompts)
    runner = open_runner(
        job["model"],
        job["threads"],
        positions_for(workload, size),
        exact=True,
        device=job["device"],
    )
    rules = policy(size, STEP_TOKENS)
    ways = {
        "continuous": None,
        "static": [range(i, min(i + size, requests)) for i in range(0, requests, size)],
    }
    found = {}
    for name, batches in ways.items():
        found[name] = asdict(serve(open_loop(runner, rules), workload, batches))
        progress(f"{name}: {found[name]['seconds']:.1f} s")
    return found
