"""`baton bench relay`: five processes against the same engine in one, same requests, one run.

Both sides' engines are pinned to one core; router, tokenizer, detokenizer and the client share the
other. Rounds alternate between the sides, each with prompts of its own so that nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

from baton.cli.http_client import scrape
from baton.cli.layout import APART, UpOptions, resolve_model
from baton.core.errors import BatonError
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.bench.load import Load, Outcome, drive
from baton_loadtest.report import Report, Result, compared

ENGINE_CORE, OTHER_CORE = "0", "1"
HTTP_PORT, GRPC_PORT = 18000, 18051


def measure(args: argparse.Namespace) -> Report:
    """Runs both sides and returns the figures. Raises BatonError when tokens differ."""
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    return Report(asyncio.run(_measure(args)))


async def _measure(args: argparse.Namespace) -> list[Result]:
    options = UpOptions(
        model=args.model,
        local_prefill_tokens=APART,
        transport=args.transport,
        threads=1,
        http_port=HTTP_PORT,
        grpc_port=GRPC_PORT,
        engine_cpus=ENGINE_CORE,
        other_cpus=OTHER_CORE,
    )
    async with fleet(options) as (layout, _):
        single = await asyncio.to_thread(_Single, str(resolve_model(args.model)[0]))
        try:
            return await _rounds(args, layout.grpc, layout.http, single)
        finally:
            single.close()


async def _rounds(args: argparse.Namespace, grpc: str, http: str, single: _Single) -> list[Result]:
    def load(seed: int) -> Load:
        return Load.random(
            seed, args.requests, args.prompt_tokens, args.output_tokens, args.concurrency
        )

    warm = Load.random(
        args.seed + args.rounds, args.concurrency, args.prompt_tokens, 4, args.concurrency
    )
    await drive(grpc, warm)
    await asyncio.to_thread(single.drive, warm)
    before = _counters(http)
    relay, alone = [], []
    for number in range(args.rounds):
        asked = load(args.seed + number)
        relay.append(await drive(grpc, asked))
        alone.append(await asyncio.to_thread(single.drive, asked))
        if relay[-1].token_ids != alone[-1].token_ids:
            raise BatonError("the two sides gave different tokens")
        print(
            f"round {number + 1} of {args.rounds}: "
            f"{relay[-1].tokens_per_second:.0f} against {alone[-1].tokens_per_second:.0f} tokens/s",
            file=sys.stderr,
        )
    after = {name: value - before[name] for name, value in _counters(http).items()}
    return _figures(relay, alone, after)


def _figures(relay: list[Outcome], alone: list[Outcome], counted: dict[str, float]) -> list[Result]:
    def both(name: str, unit: str, of: Callable[[Outcome], float]) -> Result:
        return compared(name, median(map(of, relay)), unit, median(map(of, alone)))

    prompts = counted["remote"] + counted["local"]
    return [
        both("output tokens, median round", "tokens/s", lambda o: o.tokens_per_second),
        both("time to first token, p50", "ms", lambda o: 1000 * o.first_token(0.5)),
        both("time to first token, p99", "ms", lambda o: 1000 * o.first_token(0.99)),
        Result("prompts prefilled remotely", 100 * counted["remote"] / prompts, "%"),
        Result("KV moved", counted["bytes"] / 1e6, "MB"),
        Result("requests with equal tokens", 100.0, "%"),
    ]


class _Single:
    """The baseline's process, pinned to the engine core."""

    def __init__(self, model: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [
                "taskset",
                "-c",
                ENGINE_CORE,
                sys.executable,
                "-m",
                "baton_loadtest.bench.single",
                model,
                "1",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        while self._line() != "ready":
            pass

    def drive(self, load: Load) -> Outcome:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(load)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._line()))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BatonError("the baseline's process ended")
        return line.strip()


def _counters(http: str) -> dict[str, float]:
    """The router's counts of what was prefilled where and how many KV bytes moved."""
    names = {
        "baton_remote_prefill_total": "remote",
        "baton_local_prefill_total": "local",
        "baton_kv_bytes_total": "bytes",
    }
    read = scrape(f"{http}/metrics")
    return {short: read.get(name, 0.0) for name, short in names.items()}
