"""The same engine in one process: the baseline of `baton bench relay`; serves nobody.

Runs in a process of its own, so that thread policy and pinning are set before torch is loaded.
Reads Loads as JSON lines on stdin, prints Outcomes as JSON lines.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count

from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.policy import SchedulerPolicy
from baton.decode.config import DecodeConfig
from baton.worker.engine import open_runner
from baton_loadtest.bench import serving
from baton_loadtest.bench.load import Load, Outcome


def open_loop(model: str, threads: int) -> EngineLoop:
    """An engine with the options that a decode worker has by default."""
    options = DecodeConfig(model=model, threads=threads)
    runner = open_runner(options)
    rules = SchedulerPolicy(
        max_sequences=options.max_running,
        token_budget=options.max_running + options.step_tokens,
        prefill_budget=options.step_tokens,
    )
    return serving.open_loop(runner, rules)


def drive(loop: EngineLoop, load: Load) -> Outcome:
    """Runs the load to its end, `concurrency` requests at a time."""
    waiting = enumerate(load.prompts)
    outcome = Outcome(0.0, 0, token_ids=[[] for _ in load.prompts])
    asked: dict[int, float] = {}
    began = time.perf_counter()
    running = _start(loop, load, waiting, asked, load.concurrency)
    while running:
        for event in serving.step(loop):
            for tokens in event.tokens:
                index = int(tokens.key.request_id)
                if not outcome.token_ids[index]:
                    outcome.first_token_s.append(time.perf_counter() - asked[index])
                outcome.token_ids[index].extend(tokens.token_ids)
                if tokens.finish_reason is not None:
                    running += _start(loop, load, waiting, asked, 1) - 1
    outcome.seconds = time.perf_counter() - began
    outcome.tokens = sum(map(len, outcome.token_ids))
    return outcome


def _start(
    loop: EngineLoop,
    load: Load,
    waiting: Iterator[tuple[int, tuple[int, ...]]],
    asked: dict[int, float],
    most: int,
) -> int:
    """Starts up to `most` requests; returns how many."""
    for started in count():
        following = next(waiting, None) if started < most else None
        if following is None:
            return started
        index, prompt = following
        asked[index] = time.perf_counter()
        attempt = serving.attempt(str(index), prompt, load.output_tokens)
        loop.scheduler.add(attempt, time.monotonic())
    raise AssertionError


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    loop = open_loop(model, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        said["prompts"] = tuple(tuple(prompt) for prompt in said["prompts"])
        print(json.dumps(asdict(drive(loop, Load(**said)))), flush=True)


if __name__ == "__main__":
    main()
