"""`baton bench offline`: `batonlm.LLM` against `baton up` with its client, and transformers.

The same prompts, all there from the start, greedily answered with a fixed number of tokens. Rounds
alternate; the processes of `baton up` wait while others work.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from baton_loadtest.bench import engines, peers
from baton_loadtest.bench.options import SHAPES, TRANSPORT, option
from baton_loadtest.drive import answers, random_prompts, tokens_per_second
from baton_loadtest.launch import call, cores, fleet, say
from baton_loadtest.report import Report, Result, compared
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError

PLOTS = False
OPTIONS = (
    option("--shape", "25m", SHAPES),
    option("--requests", 96),
    option("--prompt-tokens", 128),
    option("--output-tokens", 64),
    option("--batch", 16, "prompts of a batch of transformers' generate"),
    option("--rounds", 2, "of each, interleaved"),
    TRANSPORT,
)

KV_MIB = 512
"""Of each engine: enough for all that runs at once."""

DEADLINE_S = 300.0
WARM = 4
"""Prompts that each contender answers before it is timed."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if the tokens of `LLM` and of `baton up` differ."""
    with tempfile.TemporaryDirectory() as empty:
        model = engines.with_tokenizer(engines.folder(args.shape), Path(empty))
        return Report(asyncio.run(_measure(args, model)))


async def _measure(args: argparse.Namespace, model: Path) -> list[Result]:
    threads = len(cores())
    found: dict[str, list[float]] = {"llm": [], "up": [], "transformers": []}
    options = UpOptions(model=str(model), kv_memory_mib=KV_MIB, transport=args.transport)
    async with fleet(options) as running:
        for number in range(args.rounds):
            prompts = random_prompts(args.seed + number, args.requests, args.prompt_tokens)
            warm = random_prompts(-1 - number, WARM, args.prompt_tokens)
            job = {
                "model": str(model),
                "threads": threads,
                "requests": _asked(prompts, args.output_tokens),
                "warm": _asked(warm, args.output_tokens),
                "batch": args.batch,
                "seconds": DEADLINE_S / 2,
            }

            def timed(run: Any, job: dict[str, Any] = job) -> dict[str, Any]:
                return call(run, job, threads=threads, deadline_s=DEADLINE_S)

            offline = await asyncio.to_thread(timed, run_llm)
            address = running.layout.grpc
            await answers(address, warm, args.output_tokens, WARM)
            served = await answers(address, prompts, args.output_tokens, args.requests)
            static = await asyncio.to_thread(timed, peers.run_transformers)
            if offline["tokens"] != [list(each.ids) for each in served]:
                raise BatonError("LLM and `baton up` gave different tokens")
            found["llm"].append(_speed(offline))
            found["up"].append(tokens_per_second(served))
            found["transformers"].append(_speed(static))
            say(
                f"round {number + 1} of {args.rounds}: "
                + ", ".join(f"{name} {speeds[-1]:.0f}" for name, speeds in found.items())
                + " tokens/s"
            )
    llm, up, static_speed = (median(speeds) for speeds in found.values())
    name = f"transformers' generate, batches of {args.batch}"
    return [
        compared("output tokens, LLM against baton up", llm, "tokens/s", up),
        compared(f"output tokens, LLM against {name}", llm, "tokens/s", static_speed),
        Result("requests with equal tokens, LLM and baton up", 100.0, "%"),
    ]


def _asked(prompts: Any, output_tokens: int) -> dict[str, Any]:
    return {"prompts": [list(p) for p in prompts], "outputs": [output_tokens] * len(prompts)}


def _speed(served: dict[str, Any]) -> float:
    return sum(map(len, served["tokens"])) / float(served["seconds"])


def run_llm(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, requests, warm. Returns tokens and seconds."""
    from batonlm import LLM

    with LLM(job["model"], threads=job["threads"], kv_memory_mib=KV_MIB) as llm:
        seconds, tokens = 0.0, []
        for asked in (job["warm"], job["requests"]):
            began = time.perf_counter()
            found = llm.generate(
                asked["prompts"], max_tokens=asked["outputs"][0], temperature=0, ignore_eos=True
            )
            seconds = time.perf_counter() - began
            tokens = [list(answer.choices[0].token_ids) for answer in found]
    return {"tokens": tokens, "seconds": seconds}
