"""`kubectl scale` of decode from two workers to four on the cluster of KUBECONFIG while streams
run: until when they are spread evenly, and what their clients see of it.

    python scripts/scale_on_cluster.py --json cluster-scale.json

Twice, without rebalancing and with it, and the tokens of both sides are compared. Steps of workers
only take their time (`batonlm.testing.worker`); router, hand-overs and pods are real.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton_loadtest import report
from baton_loadtest.drive import GrpcLoadClient, Ids, Sample, all_answered, follow, random_prompts
from baton_loadtest.report import Result, compared, ms
from batonlm.cli.access import Access
from batonlm.cli.http_client import total
from batonlm.core.errors import BatonError
from sizes_on_cluster import released, settled
from tests.k8s.reach import reached
from tests.k8s.release import Release

BEFORE, AFTER = 2, 4
"""Decode workers."""
STEP_MS = {"prefill": (5.0, 0.1), "decode": (10.0, 5.0)}
"""A step, and each token in it."""
RUNNING = 24
"""Streams."""
BEGUN_TOKENS = 8
"""Of every stream before the pool grows."""
POLL_S = 0.5
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Side:
    """The results with rebalancing, or without."""

    tokens: list[list[int]]
    """Of each stream."""
    ready_s: float
    """Seconds from `kubectl scale` until all pods were ready."""
    even_s: float | None
    """Seconds from then until no two workers differed by more than one sequence; None: they always
    did."""
    moved: float
    """Sequences that moved."""
    gaps: list[float]
    """Seconds between tokens, from when all pods were ready."""
    took_s: float
    """Seconds from then until the last stream ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the figures here")
    add("--output-tokens", type=int, default=1500, help="of each stream")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = random_prompts(args.seed, RUNNING, 200)
    sides = {}
    with released(STEP_MS, {}) as release:
        for name, moves in (("without", 0), ("with", 60)):
            release.upgrade({"router.config.rebalance_moves": str(moves)})
            sides[name] = asyncio.run(grown(release, prompts, args.output_tokens))
    without, moving = sides["without"], sides["with"]
    if without.tokens != moving.tokens:
        raise BatonError("a stream that moved gave other tokens")
    results = [
        Result("streams", RUNNING, ""),
        Result("from kubectl scale until the pods are ready", moving.ready_s, "s", without.ready_s),
        Result("sequences that moved", moving.moved, "", without.moved),
        *(
            [Result("from then until the load is even", moving.even_s, "s")]
            if moving.even_s is not None
            else []
        ),
        *(
            compared(
                f"between tokens, p{share}, with against without",
                ms(moving.gaps, share / 100), "ms", ms(without.gaps, share / 100),
            )
            for share in (50, 99)
        ),
        compared("until all ended", moving.took_s, "s", without.took_s),
    ]  # fmt: skip
    print(report.table(results))
    if args.json:
        report.write(args.json, args.seed, results)


async def grown(release: Release, prompts: list[Ids], output_tokens: int) -> Side:
    """Begins all streams on BEFORE workers, scales, and reads all to their end."""
    await settled(release, {"prefill": 1, "decode": BEFORE})
    async with reached(release) as (grpc, _):
        client, began = GrpcLoadClient(Access(grpc)), time.perf_counter()
        samples = [Sample(0.0) for _ in prompts]
        following = [
            asyncio.create_task(follow(client, client.prepare(prompt, output_tokens), began, one))
            for prompt, one in zip(prompts, samples, strict=True)
        ]
        try:
            async with asyncio.timeout(WAIT_S):
                while any(one.tokens < BEGUN_TOKENS for one in samples):
                    all_answered([task.result() for task in following if task.done()])
                    await asyncio.sleep(POLL_S)
            scaled = time.perf_counter()
            await asyncio.to_thread(release.scale, "decode", AFTER)
            ready, even_s = time.perf_counter(), None
            while even_s is None and not any(task.done() for task in following):
                counts = await asyncio.gather(
                    *(
                        asyncio.to_thread(running, release, pod)
                        for pod in release.pod_names("decode")
                    )
                )
                if max(counts) - min(counts) <= 1:
                    even_s = time.perf_counter() - ready
            all_answered(list(await asyncio.gather(*following)))
            ended = time.perf_counter()
            moved = release.metric("router", "baton_moves_total", 'outcome="moved"')
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await client.close()
    return Side(
        tokens=[one.ids for one in samples],
        ready_s=ready - scaled,
        even_s=even_s,
        moved=moved,
        gaps=[
            later - earlier
            for one in samples
            for earlier, later in pairwise(one.events_s)
            if later > ready - began
        ],
        took_s=ended - ready,
    )


def running(release: Release, pod: str) -> float:
    """The sequences of a decode worker."""
    return total(release.metrics(pod), "baton_sequences")


if __name__ == "__main__":
    main()
