"""`baton chaos run --schedule partitions`: pairs of processes are disconnected and reconnected.

The pairs are a router and each worker, and each decode worker and each prefill worker. Each
direction, then both, are cut while streams run, restored after some seconds, and watched until the
pair works again. Only gRPC is cut; on one machine KV moves through shared memory, which no proxy
reaches, but no hand-over proceeds without its `Collect` stream.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from baton_loadtest.chaos.streams.fleet import PATIENCE_S, POLL_S, WORKER_ROLES, Fleet, fleet
from baton_loadtest.chaos.streams.load import (
    Answer,
    Load,
    Stub,
    client_of,
    compared_with,
    follow,
    left_behind,
    short,
    streams,
)
from baton_loadtest.chaos.streams.network import Edge, ProxiedNetwork, Way
from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, quantile
from batonlm.cli.http_client import total

HEAL_GOAL_S = 5.0
HANDOVER_BYTES = 512
"""More than the pings of an idle connection, less than a hand-over sends either way."""

KNOCKS_AT_A_TIME = 4

WORK = {
    "tokenizer": "baton_encoded_tokens_total",
    "prefill": "baton_prefill_tokens_total",
    "decode": "baton_decode_tokens_total",
    "detokenizer": "baton_text_bytes_total",
}
"""The counter that rises when a worker of the role works."""


class Lost(Enum):
    """Which direction of a pair's traffic is cut."""

    THERE = "caller to callee"
    BACK = "callee to caller"
    BOTH = "both ways"


@dataclass(frozen=True, slots=True)
class Cut:
    caller: str
    callee: str
    lost: Lost

    @property
    def of_router(self) -> bool:
        return self.caller.startswith("router")

    def ways(self, edge: Edge) -> list[Way]:
        return {
            Lost.THERE: [edge.there],
            Lost.BACK: [edge.back],
            Lost.BOTH: [edge.there, edge.back],
        }[self.lost]


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a pair does not work again."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    wanted, network = streams(args.seed, args.streams), ProxiedNetwork()
    back: list[float] = []
    cuts: list[Cut] = []
    async with fleet(args, network=network) as running, client_of(running.routers) as stub:
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        load = Load(stub, wanted, args.concurrency)
        knocks = Knocks(stub, args.seed)
        async with load.on_and_on():
            for cut in schedule(args.seed, running, args.cuts):
                say(f"{cut.caller} and {cut.callee}, {cut.lost.value}")
                cuts.append(cut)
                back.append(await _lose_and_find(running, network, cut, args.hold, knocks))
                say(f"together again after {back[-1]:.2f} s")
        held, unasked = await running.at_rest(), len(running.unasked)
    silences = [answer.silence(answer.times[0]) for _, answer in load.answers]
    return [
        Result("pairs of processes cut", len({(cut.caller, cut.callee) for cut in cuts}), ""),
        *(Result(f"cuts: {lost.value}", sum(c.lost is lost for c in cuts), "") for lost in Lost),
        Result("each cut lasts", args.hold, "s"),
        Result("from healing to full capacity, p50", quantile(back, 0.5), "s"),
        at_most("from healing to full capacity, longest", max(back), "s", HEAL_GOAL_S),
        *compared_with(
            [one for one, _ in load.answers],
            [reference[one.number] for one, _ in load.answers],
            [answer for _, answer in load.answers],
        ),
        at_most("short requests after healing that failed", knocks.failed, "", 0),
        Result("longest silence of a stream", max(silences), "s"),
        *left_behind(held, unasked),
    ]


def pairs_of(running: Fleet) -> list[tuple[str, str]]:
    """Returns all pairs with calls, except pairs of decode workers, which call only when one
    leaves."""
    pairs = [(r, w) for r in running.names("router") for w in running.names(*WORKER_ROLES)]
    return pairs + [(d, p) for d in running.names("decode") for p in running.names("prefill")]


def schedule(seed: int, running: Fleet, count: int) -> list[Cut]:
    """Returns cuts in an order given by the seed; count 0: all."""
    cuts = [Cut(caller, callee, lost) for caller, callee in pairs_of(running) for lost in Lost]
    random.Random(f"cuts {seed}").shuffle(cuts)
    return cuts[:count] if count else cuts


class Knocks:
    """Sends short requests, so that a reconnected pair has work."""

    def __init__(self, stub: Stub, seed: int) -> None:
        self.failed = 0
        self._stub = stub
        self._draw = random.Random(f"knocks {seed}")

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        enough = asyncio.Event()

        async def ask() -> None:
            while not enough.is_set():
                answer = Answer([time.monotonic()])
                await follow(self._stub, short(self._draw), answer)
                self.failed += not answer.finished

        asking = [asyncio.create_task(ask()) for _ in range(KNOCKS_AT_A_TIME)]
        try:
            yield
        finally:
            enough.set()
            await asyncio.gather(*asking)


async def _lose_and_find(
    running: Fleet, network: ProxiedNetwork, cut: Cut, hold_s: float, knocks: Knocks
) -> float:
    """Returns the seconds from restoring the link until the pair works and no worker is missing."""
    edge = network.edge(cut.caller, cut.callee)
    ways = cut.ways(edge)
    for way in ways:
        way.cut()
    try:
        await asyncio.sleep(hold_s)
    finally:
        for way in ways:
            way.heal()
    healed = time.monotonic()
    before = await _work(running, edge, cut)
    async with knocks.going_on():
        while not await _works(running, edge, cut, before):
            if time.monotonic() - healed > PATIENCE_S:
                raise Broken(f"{cut.caller} and {cut.callee} did not find together again")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - healed


async def _work(running: Fleet, edge: Edge, cut: Cut) -> Sequence[float]:
    """Returns counters that rise only if a pair works: the callee's own, or a hand-over's bytes."""
    if not cut.of_router:
        return (edge.there.num_fresh, edge.back.num_fresh)
    role = running.spec(cut.callee).role
    return (total(await running.metrics(cut.callee), WORK[role]),)


async def _works(running: Fleet, edge: Edge, cut: Cut, before: Sequence[float]) -> bool:
    least = 0 if cut.of_router else HANDOVER_BYTES
    now = await _work(running, edge, cut)
    risen = all(later - earlier > least for earlier, later in zip(before, now, strict=True))
    routers = running.names("router")
    return risen and all([await running.is_met(router) for router in routers])
