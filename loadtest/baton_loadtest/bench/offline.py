"""`baton bench offline`: `batonlm.LLM` against `baton up` with its client, and transformers.

The same prompts, all there from the start, greedily answered with a fixed number of tokens. Rounds
alternate; the processes of `baton up` wait while others work. Processor time says what each costs
where other work on the machine makes clocks useless.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from baton_loadtest.bench import engines, peers
from baton_loadtest.bench.options import SHAPES, TRANSPORT, option
from baton_loadtest.drive import answers, random_prompts, tokens_per_second
from baton_loadtest.launch import (
    call,
    check_cpu_clock,
    cores,
    fleet,
    say,
)
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
    check_cpu_clock()
    with tempfile.TemporaryDirectory() as empty:
        model = engines.with_tokenizer(engines.folder(args.shape), Path(empty))
        return Report(asyncio.run(_measure(args, model)))


async def _measure(args: argparse.Namespace, model: Path) -> list[Result]:
    threads = len(cores())
    found: dict[str, list[Speeds]] = {"llm": [], "up": [], "transformers": []}
    # All requests are there from the start: none is too many once the router knows the speed.
    options = UpOptions(
        model=str(model),
        kv_memory_mib=KV_MIB,
        transport=args.transport,
        router_flags=("--max-queue-s", str(DEADLINE_S)),
    )
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
            before = sum(running.spent_s().values())
            served = await answers(address, prompts, args.output_tokens, args.requests)
            spent_s = sum(running.spent_s().values()) - before
            static = await asyncio.to_thread(timed, peers.run_transformers)
            if offline["tokens"] != [list(each.ids) for each in served]:
                raise BatonError("LLM and `baton up` gave different tokens")
            tokens = sum(each.tokens for each in served)
            found["llm"].append(_speeds(offline))
            found["up"].append(Speeds(tokens_per_second(served), tokens / spent_s))
            found["transformers"].append(_speeds(static))
            each = ", ".join(f"{name} {s[-1].wall:.0f}" for name, s in found.items())
            say(f"round {number + 1} of {args.rounds}: {each} tokens/s")
    return _figures(found, args.batch)


class Speeds(NamedTuple):
    """Output tokens of one round."""

    wall: float
    """Per second."""
    cpu: float
    """Per second of processor time, of all processes that took part but the client's."""


def _figures(found: dict[str, list[Speeds]], batch: int) -> list[Result]:
    llm, up, static = (
        Speeds(*(median(column) for column in zip(*speeds, strict=True)))
        for speeds in found.values()
    )
    name = f"transformers' generate, batches of {batch}"
    of_cpu = "output tokens per second of processor time, LLM against"
    return [
        compared("output tokens, LLM against baton up", llm.wall, "tokens/s", up.wall),
        compared(f"output tokens, LLM against {name}", llm.wall, "tokens/s", static.wall),
        compared(f"{of_cpu} baton up", llm.cpu, "tokens/s", up.cpu),
        compared(f"{of_cpu} {name}", llm.cpu, "tokens/s", static.cpu),
        Result("requests with equal tokens, LLM and baton up", 100.0, "%"),
    ]


def _asked(prompts: Any, output_tokens: int) -> dict[str, Any]:
    return {"prompts": [list(p) for p in prompts], "outputs": [output_tokens] * len(prompts)}


def _speeds(served: dict[str, Any]) -> Speeds:
    tokens = sum(map(len, served["tokens"]))
    return Speeds(tokens / served["seconds"], tokens / served["cpu_seconds"])


def run_llm(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, requests, warm. Returns tokens, seconds and cpu_seconds."""
    from batonlm import LLM

    with LLM(job["model"], kv_memory_mib=KV_MIB) as llm:
        seconds, spent, tokens = 0.0, 0.0, []
        for asked in (job["warm"], job["requests"]):
            began, cpu = time.perf_counter(), time.process_time()
            found = llm.generate(
                asked["prompts"], max_tokens=asked["outputs"][0], temperature=0, ignore_eos=True
            )
            seconds, spent = time.perf_counter() - began, time.process_time() - cpu
            tokens = [list(answer.choices[0].token_ids) for answer in found]
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": spent}
