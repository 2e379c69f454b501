"""Whole requests over hand-overs that are damaged again and again, and their tokens."""

from __future__ import annotations

import argparse
import asyncio

from baton.cli.http_client import total
from baton.cli.layout import APART, UpOptions
from baton_loadtest.bench.load import Load, Outcome, drive
from baton_loadtest.chaos.cluster import cluster
from baton_loadtest.report import Result, compared

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 8

RULES = (
    "corrupt@sender.sealed:part=payload",
    "corrupt@sender.sealed:part=header",
    "stale@sender.sealed",
    "replay@sender.sealed:part=payload",
    "length@sender.sealed",
    "layout@sender.sealed",
)
"""One KV chunk a request, so none are swapped. Every second KV chunk that is sealed takes a turn.
"""


def with_settings(rule: str, **settings: int) -> str:
    """A rule with more settings."""
    more = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{rule}{',' if ':' in rule else ':'}{more}"


def corrupted(args: argparse.Namespace) -> list[Result]:
    """The same requests with and without faults."""
    every = 2 * len(RULES)
    rules = [with_settings(rule, at=2 * i + 4, every=every) for i, rule in enumerate(RULES)]
    faults = ";".join([f"seed={args.seed}", *rules])
    load = Load.random(args.seed, args.requests, PROMPT_TOKENS, OUTPUT_TOKENS, concurrency=1)
    undisturbed, _ = asyncio.run(_run(args, load, ""))
    disturbed, refused = asyncio.run(_run(args, load, faults))
    equal = sum(
        ours == theirs
        for ours, theirs in zip(disturbed.token_ids, undisturbed.token_ids, strict=True)
    )
    return [
        compared("whole requests with their own tokens", equal, "", args.requests, 1.0),
        # What was damaged is computed again by the decode worker itself or handed over once more.
        compared("KV chunks of these found damaged", refused, "", args.requests, 0.3),
    ]


async def _run(args: argparse.Namespace, load: Load, faults: str) -> tuple[Outcome, float]:
    options = UpOptions(decode=2, transport=args.transport, local_prefill_tokens=APART)
    async with cluster(options, faults=faults) as running:
        outcome = await drive(running.grpc, load)
        refused = 0.0
        for child in running.children_of("decode"):
            found = await asyncio.to_thread(running.metrics, child.spec)
            refused += total(found, "baton_parcels_refused_total")
    return outcome, refused
