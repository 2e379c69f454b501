"""`baton bench compiled`: the scheduler and the KV cache as a wheel with compiled modules has them,
against the same sources interpreted.

Both run in turns in processes of their own, each pinned to one core, and a figure is the median of
its rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from baton_loadtest.bench.cost import step_times
from baton_loadtest.bench.options import option
from baton_loadtest.launch import call, environment, say
from baton_loadtest.report import Report, compared
from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.prefix import PrefixChain, namespace

PLOTS = False
OPTIONS = (
    option(
        "--compiled",
        Path("build/compiled"),
        "where `make compiled` installed that wheel",
        metavar="FOLDER",
    ),
    option("--rounds", 15, "pairs, in turns"),
    option("--sequences", 256, "that a step of the scheduler has"),
)

DEADLINE_S = 120.0
BLOCK_SIZE = 16
PROMPT_BLOCKS = 128
PROMPTS = 100
POOL_BLOCKS = 32 * PROMPT_BLOCKS
"""Fewer than all prompts have, so that most of them evict others."""

FIGURES = {
    "step": "scheduler, a step of {sequences} sequences, p50",
    "new": "KV cache, a prompt of 2048 tokens that is new, p50",
    "known": "KV cache, a prompt of 2048 tokens that is cached, p50",
}


def measure(args: argparse.Namespace) -> Report:
    """Raises InvalidArgument for a folder without compiled modules, and ContenderFailed."""
    folder, job = args.compiled.resolve(), {"sequences": args.sequences, "seed": args.seed}
    sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(1, args.rounds + 1):
        for compiled, rounds in sides.items():
            with environment(PYTHONPATH=folder) if compiled else nullcontext():
                rounds.append(call(run_round, job, threads=1, deadline_s=DEADLINE_S))
            if rounds[-1]["compiled"] != compiled:
                wrong = f"{folder} has no" if compiled else "this installation has"
                raise InvalidArgument(f"{wrong} compiled modules", field="compiled")
        steps = " against ".join(f"{sides[side][-1]['step']:.0f}" for side in (True, False))
        say(f"round {number} of {args.rounds}: {steps} us a step")
    results = []
    for key, name in FIGURES.items():
        ours, plain = (median(one[key] for one in sides[side]) for side in (True, False))
        results.append(compared(f"{name.format(**job)}, compiled", ours, "us", plain))
    return Report(results)


def run_round(job: dict[str, Any]) -> dict[str, Any]:
    """job: sequences, seed. Returns the medians in microseconds, and whether modules are
    compiled."""
    source = sys.modules[BlockPool.__module__].__file__ or ""
    new, known = _prompts(job["seed"])
    return {
        "compiled": os.path.splitext(source)[1] != ".py",
        "step": 1e6 * median(step_times(job["sequences"], job["seed"])),
        "new": 1e6 * median(new),
        "known": 1e6 * median(known),
    }


def _prompts(seed: int) -> tuple[list[float], list[float]]:
    """Returns the seconds in which the blocks of each prompt are hashed, allocated, published and
    released: first, and again while they are cached."""
    draw = random.Random(seed)
    pool = BlockPool(POOL_BLOCKS, BLOCK_SIZE)
    root, unit_root = namespace(b"", "model"), namespace(b"", "tokenizer")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(PROMPTS):
        tokens = [draw.randrange(32000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
        for found in times:
            began = perf_counter()
            chain = PrefixChain(root, unit_root, BLOCK_SIZE)
            chain.extend(tokens, PROMPT_BLOCKS)
            table = pool.allocate(PROMPT_BLOCKS + 4, chain, PROMPT_BLOCKS - 1)
            assert table is not None
            pool.publish(table, chain, PROMPT_BLOCKS)
            pool.release(table)
            found.append(perf_counter() - began)
    return times
