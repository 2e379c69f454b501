"""`baton bench states`: what a kept copy of a sequence's state saves a conversation's next turn.

Layers that keep a state go on from a prefix only where a copy of the state behind it was kept. The
same prompt is answered in turns by an engine that has answered its beginning, so that it finds the
prefix, and by one with an empty prefix cache. Both give the same tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any, NamedTuple

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import BLOCK_SIZE, FIRST_TOKEN, GROWTH, attempt
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, compared
from batonlm.core.errors import BatonError
from batonlm.core.scheduler.events import KvComplete, NewTokens
from batonlm.core.scheduler.loop import EngineLoop

PLOTS = True
OPTIONS = (
    *engine(threads=2, shape="hybrid-25m"),
    option("--prompts", (512, 2048), "tokens of the earlier turns"),
    option("--turn-tokens", 64, "of the next turn"),
    option("--output-tokens", 8, "of each answer"),
    option("--step-tokens", 512, "positions of a step"),
    option("--rounds", 3, "of each, interleaved"),
)

DEADLINE_S = 900.0
STATES = 16
"""States that the pool has room for: snapshots may take a quarter of it."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if the tokens with and without a hit differ, or nothing is found."""
    threads = min(args.threads, len(cores()))
    model = engines.folder(args.shape)
    job = {
        "model": str(model),
        "threads": threads,
        "seed": args.seed,
        "vocab": engines.config_of(model)["vocab_size"],
        "prompts": args.prompts,
        "turn": args.turn_tokens,
        "output": args.output_tokens,
        "step_tokens": args.step_tokens,
        "rounds": args.rounds,
    }
    found = call(run, job, threads=threads, deadline_s=DEADLINE_S)
    results = [
        Result("threads", threads, ""),
        Result("a state, as KV of so many positions", found["state"], ""),
    ]
    hits, misses = [], []
    for length, one in zip(args.prompts, found["measured"], strict=True):
        hit, miss = median(one["hit"]), median(one["miss"])
        hits.append(1000 * hit)
        misses.append(1000 * miss)
        name = f"{length} tokens and {args.turn_tokens} more"
        results += [
            Result(f"{name}: found in the cache", one["cached"], "tokens"),
            compared(f"{name}: first token, found against computed", hits[-1], "ms", misses[-1]),
            Result(f"{name}: saved", miss - hit, "s"),
        ]
    lines = (Line("found", args.prompts, hits), Line("computed", args.prompts, misses))
    chart = Chart("first token of a next turn", "tokens before it", "ms", lines)
    return Report(results, (chart,))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, seed, vocab, prompts, turn, output, step_tokens, rounds.

    Returns the size of a state in positions, and for each length of prompts the seconds until the
    first token with a hit and without, and the tokens that the hit found.
    """
    from batonlm.engine.config import EngineConfig, configure_threads

    configure_threads(job["threads"])
    from batonlm.engine.footprint import foresee

    few = EngineConfig(model=job["model"], block_size=BLOCK_SIZE, num_blocks=1 << 16)
    state = foresee(few).memory.state_blocks * BLOCK_SIZE
    positions = max(job["prompts"]) + job["turn"] + job["output"] + GROWTH
    runner = engines.open_runner(job["model"], job["threads"], positions + STATES * state)
    rules = engines.policy(1, job["step_tokens"])
    draw = random.Random(job["seed"])
    measured = []
    for length in job["prompts"]:
        times: dict[str, list[float]] = {"hit": [], "miss": []}
        cached = 0
        for number in range(job["rounds"]):
            whole = [draw.randrange(FIRST_TOKEN, job["vocab"]) for _ in range(length + job["turn"])]
            answers = {}
            for side in ("hit", "miss") if number % 2 else ("miss", "hit"):
                loop = engines.engine_loop(runner, rules)
                if side == "hit":
                    _answer(loop, "first", whole[:length], 1)
                answers[side] = _answer(loop, "next", whole, job["output"])
                times[side].append(answers[side].first_s)
            cached = answers["hit"].cached
            if answers["hit"].tokens != answers["miss"].tokens:
                raise BatonError("a prefix that was found gave other tokens")
            if not cached:
                raise BatonError(f"nothing of {length} tokens was found")
        progress(f"{length} tokens: {median(times['hit']):.3f} s, {median(times['miss']):.3f} s")
        measured.append({**times, "cached": cached})
    return {"state": state, "measured": measured}


class _Answer(NamedTuple):
    tokens: list[int]
    first_s: float
    """Seconds until the first of them."""
    cached: int
    """Tokens of the prompt that were found in the prefix cache."""


def _answer(loop: EngineLoop, name: str, prompt: list[int], max_tokens: int) -> _Answer:
    """Raises BatonError."""
    began, first_s, cached = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    loop.scheduler.add(attempt(name, prompt, max_tokens), time.monotonic())
    while loop.scheduler.has_work:
        for event in engines.step_events(loop):
            match event:
                case KvComplete():
                    cached = event.cached_tokens
                case NewTokens():
                    first_s = first_s or time.perf_counter() - began
                    tokens += [token for made in event.tokens for token in made.token_ids]
    return _Answer(tokens, first_s, cached)
