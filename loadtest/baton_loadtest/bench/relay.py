"""`baton bench relay`: five processes against the same engine in one, same requests, one run.

Both sides' engines are pinned to one core; router, tokenizer, detokenizer and the client share the
other. Rounds alternate between the sides, with different prompts so that nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.options import MODEL, TRANSPORT, option
from baton_loadtest.child import answer
from baton_loadtest.drive import ANSWERED, Sample, answers, random_prompts, tokens_per_second
from baton_loadtest.launch import ENGINE_CORE, environment, fleet, peer, say, stay_off_the_engine
from baton_loadtest.report import Report, Result, compared, ms
from batonlm.cli.layout import APART, UpOptions, resolve_model
from batonlm.core.errors import BatonError
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.worker.engine import open_runner
from batonlm.worker.hardware import settled
from batonlm.worker.options import DecodeConfig

PLOTS = False
OPTIONS = (
    MODEL,
    option("--requests", 64),
    option("--concurrency", 16),
    option("--prompt-tokens", 256),
    option("--output-tokens", 64),
    TRANSPORT,
    option("--rounds", 3, "pairs, interleaved"),
)

COUNTERS = {
    "remote": "baton_remote_prefill_total",
    "local": "baton_local_prefill_total",
    "bytes": "baton_kv_bytes_total",
}

Rounds = list[list[Sample]]


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if tokens differ."""
    stay_off_the_engine()
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    options = UpOptions(
        model=args.model, local_prefill_tokens=APART, transport=args.transport, threads=1
    )
    five: Rounds = []
    one: Rounds = []
    with environment(OMP_WAIT_POLICY="PASSIVE"):
        async with (
            fleet(options, pin=True) as running,
            peer(serve_alone, int(ENGINE_CORE), threads=1) as alone,
        ):
            await alone.ask(model=str(resolve_model(args.model)[0]))

            async def both(seed: int, requests: int, tokens: int) -> None:
                prompts = random_prompts(seed, requests, args.prompt_tokens)
                five.append(await answers(running.layout.grpc, prompts, tokens, args.concurrency))
                found = await alone.ask(
                    prompts=[list(prompt) for prompt in prompts],
                    output_tokens=tokens,
                    concurrency=args.concurrency,
                )
                one.append([Sample(**each) for each in found["samples"]])

            await both(args.seed + args.rounds, args.concurrency, 4)
            before = await running.metrics()
            for number in range(args.rounds):
                await both(args.seed + number, args.requests, args.output_tokens)
                if [each.ids for each in five[-1]] != [each.ids for each in one[-1]]:
                    raise BatonError("the two sides gave different tokens")
                speeds = [tokens_per_second(side[-1]) for side in (five, one)]
                say(
                    f"round {number + 1} of {args.rounds}: "
                    f"{speeds[0]:.0f} against {speeds[1]:.0f} tokens/s"
                )
            after = await running.metrics()
    counted = {
        short: after.get(name, 0.0) - before.get(name, 0.0) for short, name in COUNTERS.items()
    }
    return _figures(five[1:], one[1:], counted)


def _figures(five: Rounds, one: Rounds, counted: dict[str, float]) -> list[Result]:
    def both(name: str, unit: str, of: Callable[[Sequence[Sample]], float]) -> Result:
        return compared(name, median(map(of, five)), unit, median(map(of, one)))

    def first_token(share: float) -> Callable[[Sequence[Sample]], float]:
        return lambda samples: ms([each.first_s - each.left_s for each in samples], share)

    prompts = counted["remote"] + counted["local"]
    return [
        both("output tokens, median round", "tokens/s", tokens_per_second),
        both("time to first token, p50", "ms", first_token(0.5)),
        both("time to first token, p99", "ms", first_token(0.99)),
        Result("prompts prefilled remotely", 100 * counted["remote"] / prompts, "%"),
        Result("KV moved", counted["bytes"] / 1e6, "MB"),
        Result("requests with equal tokens", 100.0, "%"),
    ]


async def serve_alone() -> None:
    """The same engine in one process, with a decode worker's default options.

    The first command has the model; each later one has prompts, output_tokens and concurrency, and
    is answered with samples.
    """
    loops: list[Any] = []

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        if loops:
            return {"samples": _run_alone(loops[0], **command)}
        config = DecodeConfig(model=command["model"], device="cpu", threads=1)
        with settled("decode", config) as chosen:
            options = chosen.options
            rules = SchedulerPolicy(
                max_sequences=options.max_running,
                token_budget=options.max_running + options.step_tokens,
                prefill_budget=options.step_tokens,
            )
            loops.append(engines.engine_loop(open_runner(options), rules))
        return {}

    await answer(handle)


def _run_alone(
    loop: Any, prompts: list[list[int]], output_tokens: int, concurrency: int
) -> list[dict[str, Any]]:
    """Keeps so many requests in the scheduler until all have ended."""
    samples = [Sample(0.0, len(prompt)) for prompt in prompts]
    waiting = iter(enumerate(prompts))
    began = time.perf_counter()

    def start() -> int:
        for index, prompt in waiting:
            samples[index].left_s = time.perf_counter() - began
            loop.scheduler.add(engines.attempt(str(index), prompt, output_tokens), time.monotonic())
            return 1
        return 0

    running = sum(start() for _ in range(concurrency))
    while running:
        for event in engines.step(loop):
            for tokens in event.tokens:
                sample = samples[int(tokens.key.request_id)]
                sample.add(time.perf_counter() - began, len(tokens.token_ids))
                sample.ids.extend(tokens.token_ids)
                if tokens.finish_reason is not None:
                    sample.ended_s, sample.end = sample.last_s, ANSWERED
                    running += start() - 1
    return [asdict(sample) | {"gaps_s": []} for sample in samples]
