"""`baton bench cost`: the cost of a decode step, a prompt, the scheduler and the blocks.

Decode steps are timed for each batch and context whose KV fits, and prompts for each chunk size.
The scheduler and its block pool are measured alone, with made-up tokens and no KV: all figures come
from the StepPlans, whose chunks list their blocks.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import BLOCK_SIZE, EVERYTHING, StepTimer, attempt
from baton_loadtest.bench.options import DEVICE, engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call, cores
from baton_loadtest.report import Chart, Line, Report, Result, at_most, quantile
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import ModelDescription
from batonlm.core.scheduler.events import AttemptFailed, Event, KvComplete, NewTokens
from batonlm.core.scheduler.plan import SampledToken, StepPlan, StepResult
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.rpc.loop import freeze_garbage

PLOTS = True
OPTIONS = (
    *engine(threads=1),
    DEVICE,
    option("--exact", True, action=argparse.BooleanOptionalAction),
    option("--contexts", (128, 512, 2048, 8192), "positions"),
    option("--batches", (1, 4, 16, 64)),
    option("--prompts", (128, 512, 2048, 8192)),
    option("--chunks", (512, 2048)),
    option("--kv-gb", 8.0, "larger batches are left out"),
    option("--sequences", 256, "of the scheduler"),
    option(
        "--lengths",
        None,
        "real requests' lengths, columns ContextTokens and GeneratedTokens (default: drawn)",
        type=Path,
        metavar="CSV",
    ),
)

DEADLINE_S = 600.0
SCHEDULER_US = 300.0
UNUSED_PERCENT = 4.0
REPEATED = 1024
"""Prompts up to this length are timed three times."""

POOL_BLOCKS = 65536
AT_ONCE = 64
LONGEST = 8192
VOCAB = 32000
TIMED_STEPS = 400
REQUESTS = 256
STEP_S = 0.05

RequestLengths = list[tuple[int, int]]
"""(prompt tokens, output tokens) of each request."""


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the engine cannot run."""
    threads = min(args.threads, len(cores()))
    model = engines.folder(args.shape)
    room = int(args.kv_gb * 1e9 / engines.kv_bytes(engines.config_of(model)))
    grid = [batch * (context + BLOCK_SIZE) for batch in args.batches for context in args.contexts]
    job = {
        "model": str(model),
        "threads": threads,
        "device": args.device,
        "exact": args.exact,
        "positions": max([max(args.prompts), *(wanted for wanted in grid if wanted <= room)]),
        "contexts": args.contexts,
        "batches": args.batches,
        "prompts": args.prompts,
        "chunks": args.chunks,
    }
    steps = call(run_steps, job, threads=threads, deadline_s=DEADLINE_S)
    lengths = str(args.lengths.resolve()) if args.lengths else ""
    job = {"seed": args.seed, "sequences": args.sequences, "lengths": lengths}
    alone = call(run_scheduler, job, threads=1, deadline_s=DEADLINE_S)
    return Report(
        [*_steps(steps), *_scheduler(alone, args.sequences), *_blocks(alone)],
        (_decode_chart(steps, args), _prefill_chart(steps, args)),
    )


def run_steps(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, device, exact, positions, contexts, batches, prompts, chunks.

    Returns decode as (batch, context, seconds) and prefill as (chunk, prompt tokens, seconds), for
    what fits.
    """
    timer = StepTimer(
        engines.open_runner(
            job["model"], job["threads"], job["positions"], exact=job["exact"], device=job["device"]
        )
    )
    decode, prefill = [], []
    for batch in job["batches"]:
        fitting = [context for context in job["contexts"] if timer.fits(batch, context)]
        decode += [(batch, context, timer.decode(batch, context)) for context in fitting]
        progress(f"decode at batch {batch}: contexts {fitting}")
    for chunk in job["chunks"]:
        fitting = [length for length in job["prompts"] if timer.fits(1, length)]
        for length in fitting:
            repeats = 3 if length <= REPEATED else 1
            seconds = min(timer.prefill(length, chunk) for _ in range(repeats))
            prefill.append((chunk, length, seconds))
        progress(f"prefill in chunks of {chunk}: {fitting} tokens")
    return {"decode": decode, "prefill": prefill}


def _steps(steps: dict[str, Any]) -> list[Result]:
    decode = [
        Result(f"decode step, batch {batch}, context {context}", 1000 * seconds, "ms")
        for batch, context, seconds in steps["decode"]
    ]
    prefill = [
        Result(f"prefill of {length} in chunks of {chunk}", length / seconds, "tokens/s")
        for chunk, length, seconds in steps["prefill"]
        if length >= chunk or chunk == min(c for c, _, _ in steps["prefill"])
    ]
    return decode + prefill


def _decode_chart(steps: dict[str, Any], args: argparse.Namespace) -> Chart:
    lines = []
    for batch in args.batches:
        points = [(context, 1000 * s) for b, context, s in steps["decode"] if b == batch]
        if points:
            lines.append(Line(f"batch {batch}", *zip(*points, strict=True)))
    return Chart(f"decode, {args.shape}", "context", "ms a step", tuple(lines), log=True)


def _prefill_chart(steps: dict[str, Any], args: argparse.Namespace) -> Chart:
    lines = []
    for chunk in args.chunks:
        points = [(length, length / s) for c, length, s in steps["prefill"] if c == chunk]
        lines.append(Line(f"chunks of {chunk}", *zip(*points, strict=True)))
    return Chart(f"prefill, {args.shape}", "prompt tokens", "tokens/s", tuple(lines), log=True)


@dataclass(slots=True)
class BlockWaste:
    """Positions, summed over all steps and the sequences that decode in them."""

    owned: int = 0
    unused: int = 0
    """Unused positions of partly filled last blocks."""
    ahead: int = 0
    """Positions of whole blocks reserved for growth."""
    slabs: int = 0
    """Positions if each sequence had room for the longest request."""


@dataclass(slots=True)
class BlockSharing:
    """Blocks and tokens, summed over all steps."""

    named: int = 0
    """Blocks in all sequences' tables."""
    different: int = 0
    """How many distinct blocks these are."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens whose KV was cached."""


def run_scheduler(job: dict[str, Any]) -> dict[str, Any]:
    """job: seed, sequences (of the timed scheduler), lengths (a CSV file or "").

    Returns step_s, the scheduler's own seconds of every step; waste for each mix of lengths; and
    sharing for each kind of shared prefix.
    """
    draw = random.Random(job["seed"])
    mixes = {
        "short requests": [(draw.randint(32, 512), draw.randint(16, 256)) for _ in range(REQUESTS)]
    }
    if job["lengths"]:
        mixes["recorded requests"] = read_lengths(Path(job["lengths"]), REQUESTS)
    else:
        mixes["chat requests"] = _chat_lengths(job["seed"])
    kinds = {
        "8 system prompts, 256 users": _users_of_system_prompts(job["seed"]),
        "4 choices of each request": _four_choices(job["seed"]),
    }
    return {
        "step_s": step_times(job["sequences"], job["seed"]),
        "waste": {name: asdict(waste(lengths, job["seed"])) for name, lengths in mixes.items()},
        "sharing": {name: asdict(sharing(asked)) for name, asked in kinds.items()},
    }


def _chat_lengths(seed: int) -> RequestLengths:
    """Returns log-normal lengths, as in public chat traces: median 900 in, 150 out, long tails."""
    draw = random.Random(seed)

    def length(middle: int, spread: float, most: int) -> int:
        return min(most, max(8, round(middle * draw.lognormvariate(0.0, spread))))

    return [(length(900, 0.9, 4096), length(150, 0.8, 1024)) for _ in range(REQUESTS)]


def read_lengths(path: Path, requests: int) -> RequestLengths:
    """Returns the first requests of a CSV file. Raises InvalidArgument."""
    try:
        with path.open(newline="") as opened:
            found = [
                (int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
                for row, _ in zip(csv.DictReader(opened), range(requests), strict=False)
            ]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InvalidArgument(f"cannot be read: {error}", field="lengths") from None
    return [pair for pair in found if sum(pair) <= LONGEST]


def _users_of_system_prompts(seed: int) -> list[Attempt]:
    """Returns 256 users of 8 system prompts of 512 tokens each, with their own questions."""
    draw = random.Random(seed)
    systems = [_drawn(draw, 512) for _ in range(8)]
    return [
        attempt(
            str(user),
            [*systems[draw.randrange(8)], *_drawn(draw, draw.randint(32, 256))],
            draw.randint(64, 128),
        )
        for user in range(256)
    ]


def _four_choices(seed: int) -> list[Attempt]:
    """Returns 64 requests for 4 choices each."""
    draw = random.Random(seed)
    return [
        attempt(str(i), _drawn(draw, draw.randint(128, 512)), draw.randint(64, 128), (0, 1, 2, 3))
        for i in range(64)
    ]


def _drawn(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]


def new_scheduler(max_sequences: int = AT_ONCE) -> Scheduler:
    """Returns a decode worker's scheduler, with more blocks than it needs."""
    rules = SchedulerPolicy(max_sequences=max_sequences, limit=EVERYTHING)
    model = ModelDescription(
        name="none", digest="", max_model_len=LONGEST, vocab_size=VOCAB, eos_token_ids=()
    )
    return Scheduler(BlockPool(POOL_BLOCKS, BLOCK_SIZE), rules, model)


def replay(
    scheduler: Scheduler, attempts: Iterable[Attempt], at_once: int = AT_ONCE
) -> Iterator[tuple[StepPlan, list[Event]]]:
    """Keeps at_once sequences in the scheduler until all attempts have ended. Yields each step's
    plan and events. Raises BatonError if the scheduler makes no progress."""
    waiting = iter(attempts)
    inside, now = 0, 0.0
    while True:
        while inside < at_once and (following := next(waiting, None)) is not None:
            scheduler.add(following, now)
            inside += len(following.choices)
        plan = scheduler.plan(now)
        if plan is None:
            break
        events = scheduler.apply(_made_up(plan), now)
        yield plan, events
        for event in events:
            if isinstance(event, AttemptFailed):
                raise BatonError(event.error.message)
            if isinstance(event, NewTokens):
                inside -= sum(made.finish_reason is not None for made in event.tokens)
        now += STEP_S
    if scheduler.has_work:
        raise BatonError("the scheduler plans nothing and has work")


def _made_up(plan: StepPlan) -> StepResult:
    """Returns the same token for every sample."""
    rows = (row for chunk in plan.chunks for row in chunk.samples)
    tokens = tuple(SampledToken(row.sequence_id, row.choice, 7) for row in rows)
    return StepResult(plan.step, tokens)


def waste(lengths: RequestLengths, seed: int) -> BlockWaste:
    """Returns the waste of a replay in which no prompts share a prefix."""
    draw = random.Random(seed)
    slab = max(map(sum, lengths))
    found = BlockWaste()
    decoding: set[int] = set()
    attempts = (
        attempt(str(index), _drawn(draw, prompt), output)
        for index, (prompt, output) in enumerate(lengths)
    )
    for plan, _ in replay(new_scheduler(), attempts):
        for chunk in plan.chunks:
            if chunk.sequence_id in decoding:
                owned = BLOCK_SIZE * sum(count for _, count in chunk.extents)
                filled = -(-chunk.end_position // BLOCK_SIZE) * BLOCK_SIZE
                found.owned += owned
                found.ahead += owned - filled
                found.unused += filled - chunk.end_position
                found.slabs += slab
            decoding.update(row.sequence_id for row in chunk.samples)
    return found


def sharing(attempts: Sequence[Attempt]) -> BlockSharing:
    """Returns the sharing of a replay."""
    found = BlockSharing(input_tokens=sum(len(one.token_ids) for one in attempts))
    for plan, events in replay(new_scheduler(), attempts):
        tables = [
            {block for first, count in chunk.extents for block in range(first, first + count)}
            for chunk in plan.chunks
        ]
        found.named += sum(map(len, tables))
        found.different += len(set().union(*tables))
        found.cached_tokens += sum(e.cached_tokens for e in events if isinstance(e, KvComplete))
    return found


def step_times(sequences: int, seed: int) -> list[float]:
    """Returns the seconds of planning and applying steps with so many decoding sequences."""
    draw = random.Random(seed)
    scheduler = new_scheduler(sequences)
    for index in range(sequences):
        prompt = _drawn(draw, draw.randint(128, 512))
        scheduler.add(attempt(str(index), prompt, sequences + TIMED_STEPS * 2), 0.0)
    # As workers do after loading.
    freeze_garbage()
    times: list[float] = []
    while len(times) < TIMED_STEPS:
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = _made_up(plan)
        resumed = time.perf_counter()
        scheduler.apply(result, 0.0)
        ended = time.perf_counter()
        if sum(len(chunk.token_ids) == 1 for chunk in plan.chunks) == sequences:
            times.append(planned - began + ended - resumed)
    return times


def _scheduler(alone: dict[str, Any], sequences: int) -> list[Result]:
    times = [1e6 * seconds for seconds in alone["step_s"]]
    name = f"scheduler, per step of {sequences} sequences"
    return [
        at_most(f"{name}, p50", median(times), "µs", SCHEDULER_US),
        Result(f"{name}, p99", quantile(times, 0.99), "µs"),
    ]


def _blocks(alone: dict[str, Any]) -> list[Result]:
    found = []
    for mix, one in alone["waste"].items():
        owned, used = one["owned"], one["owned"] - one["unused"] - one["ahead"]
        slabs = 100 * (1 - used / one["slabs"])
        unused = 100 * one["unused"] / owned
        found += [
            at_most(f"KV memory unused, {mix}", unused, "%", UNUSED_PERCENT),
            Result(f"KV memory taken ahead to grow, {mix}", 100 * one["ahead"] / owned, "%"),
            Result(f"KV memory unused with slabs of the longest request, {mix}", slabs, "%"),
        ]
    for kind, one in alone["sharing"].items():
        saved = 100 * (1 - one["different"] / one["named"])
        found.append(Result(f"blocks saved by sharing, {kind}", saved, "%"))
        if one["cached_tokens"]:
            cached = 100 * one["cached_tokens"] / one["input_tokens"]
            found.append(Result(f"prompt tokens found in the cache, {kind}", cached, "%"))
    return found
