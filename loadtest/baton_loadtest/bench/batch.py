"""`baton bench batch`: how much a concurrent `baton batch` delays interactive streams.

A decode worker has a target for the time between two tokens. The same interactive requests, a few
at a time, run alone and beside a batch, in turns. The batch is the command itself; it is stopped
after its turn, and resumes with the same output in its next turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton_loadtest.bench.options import MODEL, option
from baton_loadtest.drive import answers, random_prompts
from baton_loadtest.launch import RunningBaton, environment, fleet, say, stay_off_the_engine
from baton_loadtest.report import Report, Result, at_most, compared, ms
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError

PLOTS = False
OPTIONS = (
    MODEL,
    option("--target-ms", 50.0, "inter_token_ms", metavar="MS"),
    option("--streams", 4, "interactive, at a time"),
    option("--requests", 24, "of each turn"),
    option("--prompt-tokens", 64),
    option("--output-tokens", 96),
    option("--rounds", 3, "pairs, in turns"),
)

LINES = 50_000
"""Lines of the batch: more than are answered."""

SETTLE_S = 5.0
WAIT_S = 60.0


@dataclass(slots=True)
class BatchSide:
    """The interactive streams of all turns of one side, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    lines: int = 0
    """Number of lines that the batch answered."""
    batch_s: float = 0.0
    """The time in which it answered them."""


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if a stream or the batch fails."""
    stay_off_the_engine()
    with (
        environment(BATON_INTER_TOKEN_MS=args.target_ms),
        tempfile.TemporaryDirectory() as folder,
    ):
        alone, beside = asyncio.run(_measure(args, Path(folder)))
    target, batch_tokens = args.target_ms, beside.lines * args.output_tokens
    return Report(
        [
            Result("interactive streams at a time", args.streams, ""),
            Result("configured target between tokens", target, "ms"),
            Result("between tokens, p50, alone", ms(alone.gaps, 0.5), "ms"),
            Result("between tokens, p50, beside a batch", ms(beside.gaps, 0.5), "ms"),
            at_most("between tokens, p99, alone", ms(alone.gaps, 0.99), "ms", target),
            at_most("between tokens, p99, beside a batch", ms(beside.gaps, 0.99), "ms", target),
            *(
                compared(
                    f"first token, p{100 * share:g}, beside a batch against alone",
                    ms(beside.first, share),
                    "ms",
                    ms(alone.first, share),
                )
                for share in (0.5, 0.99)
            ),
            Result("batch, beside the streams", batch_tokens / beside.batch_s, "tokens/s"),
        ]
    )


async def _measure(args: argparse.Namespace, folder: Path) -> tuple[BatchSide, BatchSide]:
    given, out = folder / "in.jsonl", folder / "out.jsonl"
    _write(given, args)
    alone, beside = BatchSide(), BatchSide()
    options = UpOptions(model=args.model, prefill=0, transport="loopback")
    async with fleet(options, pin=True) as running:
        # The decode worker measures its step times, which its target needs.
        async with _batch(running, given, out):
            await _turn(running, args, 0, BatchSide())
        for number in range(1, args.rounds + 1):
            await _turn(running, args, number, alone)
            async with _batch(running, given, out):
                before, began = _lines(out), time.perf_counter()
                await _turn(running, args, number, beside)
                beside.batch_s += time.perf_counter() - began
                answered = _lines(out) - before
                if not answered:
                    raise BatonError("the batch answered nothing beside the streams")
                beside.lines += answered
            p99 = [ms(side.gaps, 0.99) for side in (alone, beside)]
            say(f"turn {number} of {args.rounds}: p99 {p99[0]:.1f} ms alone, {p99[1]:.1f} beside")
    return alone, beside


async def _turn(
    running: RunningBaton, args: argparse.Namespace, number: int, side: BatchSide
) -> None:
    prompts = random_prompts(args.seed + number, args.requests, args.prompt_tokens)
    samples = await answers(running.layout.grpc, prompts, args.output_tokens, args.streams)
    side.first += [sample.first_s - sample.left_s for sample in samples]
    side.gaps += [gap for sample in samples for gap in sample.gaps_s if gap]


@asynccontextmanager
async def _batch(running: RunningBaton, given: Path, out: Path) -> AsyncIterator[None]:
    """Runs the command. The block begins when lines are answered, and its end sends Ctrl-C."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batonlm.cli.main", "batch", str(given), str(out)),
        *("--http", running.layout.http.removeprefix("http://")),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        if process.returncode is not None:
            raise BatonError("the batch ended before the streams did")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def _write(given: Path, args: argparse.Namespace) -> None:
    with given.open("w") as file:
        for number, prompt in enumerate(random_prompts(args.seed - 1, LINES, args.prompt_tokens)):
            line = {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "prompt": list(prompt),
                    "max_tokens": args.output_tokens,
                    "ignore_eos": True,
                },
            }
            file.write(json.dumps(line) + "\n")
