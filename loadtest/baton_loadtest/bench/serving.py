"""Runs a workload on Baton's own engine in this process.

Modules that are called by `child` in a process of its own build on it. torch is imported when a
runner is opened, after threads are set.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.errors import BatonError
from baton.core.kvcache.block_pool import BlockPool
from baton.core.request.attempt import Attempt
from baton.core.request.request import SamplingParams, StopParams
from baton.core.scheduler.events import AttemptFailed, NewTokens
from baton.core.scheduler.loop import EngineLoop
from baton.core.scheduler.plan import ModelRunner
from baton.core.scheduler.policy import QueueLimit, SchedulerPolicy
from baton.core.scheduler.scheduler import Scheduler
from baton.engine.config import EngineConfig, configure_threads
from baton_loadtest.bench.workload import Workload

if TYPE_CHECKING:
    from baton.engine.runner import TorchRunner

BLOCK_SIZE = 16
GROWTH = 128
"""Positions that a sequence may need beyond its own: headroom, and a last block partly filled."""

EVERYTHING = QueueLimit(tokens=2**40, sequences=2**20)


@dataclass(slots=True)
class Served:
    """tokens: output ids of each request. occupancy: how many sequences got a token, each step."""

    tokens: list[list[int]]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    occupancy: list[int] = field(default_factory=list)


def open_runner(
    model: str,
    threads: int,
    positions: int,
    *,
    exact: bool,
    quantize: str = "none",
    device: str = "cpu",
) -> TorchRunner:
    """A runner with KV memory for so many positions. A process's second one keeps its threads."""
    if "torch" not in sys.modules:
        configure_threads(threads)
    from baton.engine.runner import TorchRunner

    return TorchRunner.load(
        EngineConfig(
            model=model,
            device=device,
            block_size=BLOCK_SIZE,
            num_blocks=-(-positions // BLOCK_SIZE),
            exact=exact,
            threads=threads,
            quantize=quantize,
        )
    )


def positions_for(workload: Workload, at_once: int) -> int:
    """KV positions that suffice to run so many of its requests at once without preemption."""
    pairs = zip(workload.prompts, workload.outputs, strict=True)
    longest = sorted((len(prompt) + output for prompt, output in pairs), reverse=True)
    return sum(length + GROWTH for length in longest[:at_once])


def open_loop(runner: ModelRunner, policy: SchedulerPolicy) -> EngineLoop:
    """A scheduler of its own, with an empty prefix cache, over a runner."""
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, runner.block_size),
        policy,
        runner.model,
        num_swap_blocks=runner.num_swap_blocks,
    )
    return EngineLoop(runner, scheduler)


def policy(max_sequences: int, step_tokens: int) -> SchedulerPolicy:
    """Steps of at most step_tokens positions, decode first, the rest for prefill."""
    return SchedulerPolicy(
        max_sequences=max_sequences,
        token_budget=step_tokens,
        prefill_budget=step_tokens,
        limit=EVERYTHING,
    )


def attempt(
    name: str, prompt: Sequence[int], max_tokens: int, choices: tuple[int, ...] = (0,)
) -> Attempt:
    """Greedy, of a length known in advance."""
    return Attempt(
        request_id=name,
        attempt=1,
        choices=choices,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )


def serve(loop: EngineLoop, workload: Workload, batches: Iterable[range] | None = None) -> Served:
    """Runs every request to its end. batches: requests that wait until all before them have ended;
    None lets all in at once."""
    served = Served([[] for _ in workload.prompts])
    began, cpu = time.perf_counter(), time.process_time()
    for batch in batches or [range(len(workload.prompts))]:
        for index in batch:
            asked = attempt(str(index), workload.prompts[index], workload.outputs[index])
            loop.scheduler.add(asked, time.monotonic())
        while loop.scheduler.has_work:
            for tokens in step(loop):
                served.occupancy.append(len(tokens.tokens))
                for made in tokens.tokens:
                    served.tokens[int(made.key.request_id)].extend(made.token_ids)
    served.seconds = time.perf_counter() - began
    served.cpu_seconds = time.process_time() - cpu
    return served


def step(loop: EngineLoop) -> list[NewTokens]:
    """One step; what it sampled. Raises the error of a request that failed."""
    found = []
    for event in loop.step(time.monotonic()):
        if isinstance(event, AttemptFailed):
            raise BatonError(event.error.message)
        if isinstance(event, NewTokens):
            found.append(event)
    return found
