"""`baton bench stalls`: how long prompts that arrive delay the tokens of running sequences.

One engine prefills and decodes. With chunks a step computes a limited number of a prompt's
positions, so that other sequences keep getting tokens; without, the whole prompt is one step for
which all wait.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import FIRST_TOKEN, GROWTH, attempt
from baton_loadtest.bench.options import DEVICE, engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, compared, ms
from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.plan import ModelRunner

PLOTS = True
OPTIONS = (
    *engine(threads=1),
    DEVICE,
    option("--running", 16, "sequences that run"),
    option("--output-tokens", 160, "of each"),
    option("--prompt-tokens", 4096),
    option("--arrivals", 3, "long prompts"),
    option("--chunks", (256, 512)),
)

SHORT_PROMPT = 64
DEADLINE_S = 600.0


def measure(args: argparse.Namespace) -> Report:
    """Raises InvalidArgument if the model's length is too short for the prompts."""
    threads = min(args.threads, len(cores()))
    model = engines.folder(args.shape)
    config = engines.config_of(model)
    if args.prompt_tokens >= config["max_position_embeddings"]:
        raise InvalidArgument("is more than the model has positions", field="prompt_tokens")
    job = {
        "model": str(model),
        "threads": threads,
        "device": args.device,
        "seed": args.seed,
        "vocab": config["vocab_size"],
        "running": args.running,
        "output": args.output_tokens,
        "prompt": args.prompt_tokens,
        "arrivals": args.arrivals,
        "chunks": [*args.chunks, args.prompt_tokens],
    }
    measured = call(run, job, threads=threads, deadline_s=DEADLINE_S)["measured"]
    results = [
        Result("running sequences", args.running, ""),
        Result("prompts that arrive", args.arrivals, ""),
        Result("tokens of each", args.prompt_tokens, ""),
    ]
    lines = []
    for chunk, found in zip((*args.chunks, args.prompt_tokens), measured, strict=True):
        name = f"chunks of {chunk}" if chunk < args.prompt_tokens else "no chunks"
        gaps = found["gaps"]
        results += [
            compared(
                f"between tokens, p99 against p50, {name}", ms(gaps, 0.99), "ms", ms(gaps, 0.5)
            ),
            Result(f"between tokens, longest, {name}", 1000 * max(gaps), "ms"),
            Result(f"first token of a long prompt, p50, {name}", ms(found["first"], 0.5), "ms"),
        ]
        steps = [1000 * seconds for seconds in found["longest"]]
        lines.append(Line(name, range(len(steps)), steps))
    title = f"{args.running} sequences, {args.arrivals} prompts of {args.prompt_tokens} tokens"
    chart = Chart(title, "step", "longest wait for a token, ms", tuple(lines))
    return Report(results, (chart,))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, device, seed, vocab, running, output, prompt, arrivals, chunks.

    Returns for each chunk size, in seconds: all gaps between a sequence's tokens, the longest gap
    that ended in each step, and the long prompts' times to first token.
    """
    positions = job["running"] * (SHORT_PROMPT + job["output"] + GROWTH)
    positions += job["arrivals"] * (job["prompt"] + GROWTH)
    runner = engines.open_runner(job["model"], job["threads"], positions, device=job["device"])
    measured = []
    for chunk in job["chunks"]:
        measured.append(_stall(runner, chunk, job))
        progress(f"chunks of {chunk}: longest gap {max(measured[-1]['gaps']):.2f} s")
    return {"measured": measured}


def _stall(runner: ModelRunner, chunk: int, job: dict[str, Any]) -> dict[str, list[float]]:
    """Long prompts arrive when the running sequences have made equal parts of their tokens."""
    draw = random.Random(job["seed"])
    running, output, arrivals = job["running"], job["output"], job["arrivals"]

    def prompt(length: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN, job["vocab"]) for _ in range(length)]

    most = running + arrivals
    loop = engines.engine_loop(runner, engines.policy(most, chunk, beside=most))
    for index in range(running):
        one = attempt(f"running {index}", prompt(SHORT_PROMPT), output)
        loop.scheduler.add(one, time.monotonic())
    arrive_at = [running * output * (i + 1) // (arrivals + 1) for i in range(arrivals)]
    last: dict[str, float] = {}
    arrived: dict[str, float] = {}
    gaps: list[float] = []
    longest: list[float] = []
    first: list[float] = []
    made = 0
    while loop.scheduler.has_work:
        while arrive_at and made >= arrive_at[0]:
            name = f"arrived {len(arrive_at)}"
            del arrive_at[0]
            arrived[name] = time.perf_counter()
            loop.scheduler.add(attempt(name, prompt(job["prompt"]), 1), time.monotonic())
        found = engines.step(loop)
        now = time.perf_counter()
        waited: list[float] = []
        for tokens in (one for event in found for one in event.tokens):
            name = tokens.key.request_id
            if name in arrived:
                first.append(now - arrived[name])
                continue
            made += 1
            # Not while the prompts of the running sequences are computed.
            if name in last and len(last) == running:
                waited.append(now - last[name])
            last[name] = now
        gaps += waited
        longest += [max(waited)] if waited else []
    return {"gaps": gaps, "longest": longest, "first": first}
