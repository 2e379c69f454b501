"""`baton chaos kv cancel-storm`: requests cancelled at any moment leave no resources behind.

Router and workers are real processes. Blocks, buffers, tasks and file descriptors of each process
are counted before and after the storm. Then running requests are cancelled one at a time, until all
blocks of the decode worker are free; that time includes the path through the router and the
polling.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from baton_loadtest.chaos.cluster import Cluster, call, cluster, read
from baton_loadtest.chaos.world import Broken
from baton_loadtest.report import Result, at_most, quantile
from batonlm.cli.http_client import total
from batonlm.cli.layout import APART, UpOptions
from batonlm.cli.supervisor import ChildProcess
from batonlm.rpc.channels import open_channel
from batonlm.v1 import inference_pb2_grpc

CONCURRENCY = 24
LONGEST_S = 0.25
"""The longest time before a request is cancelled: about the duration of a whole one here."""

WITHIN_S = 2.0
SETTLE_S = 30.0
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 200
FREE_GOAL_MS = 50.0

Counts = Mapping[str, float]


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if the processes do not become idle."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    draw = random.Random(args.seed)
    async with (
        cluster(UpOptions(transport=args.transport, local_prefill_tokens=APART)) as running,
        open_channel(running.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        # Creates everything that is created once and kept.
        await asyncio.gather(*(read(_ask(stub, draw)) for _ in range(CONCURRENCY)))
        await _storm(stub, draw, 5 * CONCURRENCY)
        before = await _at_rest(running)
        finished = await _storm(stub, draw, args.count)
        after, seconds = await _rest(running, before)
        waits, step_ms = await _cancel_one_by_one(running, stub, draw, args.samples)
    kinds = sorted({name.partition(" ")[2] for name in before})
    p50, p99, longest = (1000 * quantile(waits, share) for share in (0.5, 0.99, 1.0))
    return [
        Result("requests cancelled at random moments", args.count - finished, ""),
        Result("that ended before they were cancelled", finished, ""),
        at_most("until everything was as before", seconds, "s", WITHIN_S),
        *(at_most(f"{kind} left behind", _left(before, after, kind), "", 0) for kind in kinds),
        Result("cancel to blocks free, p50", p50, "ms"),
        at_most("cancel to blocks free, p99", p99, "ms", FREE_GOAL_MS + step_ms),
        Result("cancel to blocks free, longest", longest, "ms"),
        Result("a step, mean", step_ms, "ms"),
    ]


async def _storm(stub: inference_pb2_grpc.InferenceStub, draw: random.Random, count: int) -> int:
    """Cancels so many requests, CONCURRENCY at a time. Returns how many had ended before."""
    left, finished = iter(range(count)), 0

    async def worker() -> None:
        nonlocal finished
        for _ in left:
            asked = _ask(stub, draw)
            reading = asyncio.create_task(read(asked))
            done, _ = await asyncio.wait([reading], timeout=draw.uniform(0, LONGEST_S))
            asked.cancel()
            finished += bool(done)
            await asyncio.wait([reading])

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return finished


async def _cancel_one_by_one(
    running: Cluster, stub: inference_pb2_grpc.InferenceStub, draw: random.Random, samples: int
) -> tuple[list[float], float]:
    """Returns the seconds from cancel to free blocks, and a step's mean time in milliseconds."""
    decode = running.child("decode-0").spec
    waits = []
    for _ in range(samples):
        asked = _ask(stub, draw)
        for _ in range(draw.randint(3, 8)):
            await asked.read()
        cancelled = time.perf_counter()
        asked.cancel()
        while total(await asyncio.to_thread(running.metrics, decode), *_USED):
            if time.perf_counter() - cancelled > SETTLE_S:
                raise Broken("a cancelled request's blocks did not come back")
        waits.append(time.perf_counter() - cancelled)
    found = running.metrics(decode)
    step = found["baton_step_seconds_sum"] / found["baton_step_seconds_count"]
    return waits, 1000 * step


_USED = ("baton_blocks", 'state="used"')


async def _at_rest(running: Cluster) -> Counts:
    """Returns the counts of an idle cluster: the minimum of several polls, because tasks vary."""
    await asyncio.sleep(WITHIN_S)
    looks = [await _counts(running) for _ in range(5)]
    return {name: min(look[name] for look in looks) for name in looks[0]}


async def _rest(running: Cluster, before: Counts) -> tuple[Counts, float]:
    """Polls until each count has returned to its earlier value, or a time limit. Returns the counts
    and the seconds. Counts are compared one by one, because a poll itself briefly uses a socket and
    a task.
    """
    began = time.perf_counter()
    after = dict(before)
    missing = set(before)
    while True:
        now, seconds = await _counts(running), time.perf_counter() - began
        missing = {name for name in missing if now[name] > before[name]}
        if not missing or seconds > SETTLE_S:
            return after | {name: now[name] for name in missing}, seconds
        await asyncio.sleep(0.02)


async def _counts(running: Cluster) -> Counts:
    """Returns counts by "process what": used blocks and buffers, requests or attempts, tasks, file
    descriptors."""
    counts: dict[str, float] = {}
    for child in running.children:
        counts.update(await asyncio.to_thread(_counts_of, running, child))
    return counts


def _counts_of(running: Cluster, child: ChildProcess) -> dict[str, float]:
    found = running.metrics(child.spec)
    counts = {
        "tasks": total(found, "baton_tasks"),
        "file descriptors": float(len(os.listdir(f"/proc/{child.pid}/fd"))),
    }
    if child.spec.role in ("prefill", "decode"):
        counts["blocks"] = total(found, *_USED)
        buffers = total(found, "baton_slots")
        counts["buffers"] = buffers - total(found, "baton_slots", 'state="free"')
    if child.spec.role == "router":
        counts["requests"] = total(found, "baton_requests_open")
    return {f"{child.spec.name} {what}": count for what, count in counts.items()}


def _left(before: Counts, after: Counts, kind: str) -> float:
    """Returns the increase of a count over all processes."""
    names = [name for name in before if name.partition(" ")[2] == kind]
    return sum(max(0.0, after[name] - before[name]) for name in names)


def _ask(stub: inference_pb2_grpc.InferenceStub, draw: random.Random) -> Any:
    return call(stub, draw, PROMPT_TOKENS, OUTPUT_TOKENS)
