"""`baton chaos run --schedule slow-links`: links between processes get high latency, low bandwidth.

One link after another, in an order given by the seed, delays every byte and limits the rate, while
streams run. No worker may be declared dead because of a slow link.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from baton_loadtest.chaos.streams.fleet import fleet, hits
from baton_loadtest.chaos.streams.load import Load, client_of, compared_with, left_behind, streams
from baton_loadtest.chaos.streams.network import ProxiedNetwork
from baton_loadtest.chaos.streams.partitions import pairs_of
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, quantile

DELAYS_S = (0.02, 0.2)
"""The longest corresponds to a round trip around the world."""

BYTES_PER_S = (64 * 1024, 1024 * 1024)


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken, StartFailed."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    wanted, network = streams(args.seed, args.streams), ProxiedNetwork()
    draw = random.Random(f"slow links {args.seed}")
    async with fleet(args, network=network) as running, client_of(running.routers) as stub:
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        pairs = pairs_of(running)
        draw.shuffle(pairs)
        load = Load(stub, wanted, args.concurrency)
        async with load.on_and_on():
            for caller, callee in pairs[: args.cuts or None]:
                delay_s, bytes_per_s = draw.uniform(*DELAYS_S), draw.uniform(*BYTES_PER_S)
                say(f"{caller} and {callee}, {1000 * delay_s:.0f} ms, {bytes_per_s:.0f} B/s")
                edge = network.edge(caller, callee)
                for way in (edge.there, edge.back):
                    way.delay_s, way.bytes_per_s = delay_s, bytes_per_s
                await asyncio.sleep(args.hold)
                for way in (edge.there, edge.back):
                    way.delay_s, way.bytes_per_s = 0.0, 0.0
        held, unasked = await running.at_rest(), len(running.unasked)
        touched = hits(running.log)
    lost = sum(answer.request_id in touched for _, answer in load.answers)
    silences = [answer.silence(answer.times[0]) for _, answer in load.answers]
    return [
        Result("links made slow, one after the other", len(pairs[: args.cuts or None]), ""),
        Result("each for", args.hold, "s"),
        Result("delay each way, at most", 1000 * DELAYS_S[1], "ms"),
        Result("bytes a second, at least", BYTES_PER_S[0], "B"),
        at_most("streams that lost a worker", lost, "", 0),
        *compared_with(
            [one for one, _ in load.answers],
            [reference[one.number] for one, _ in load.answers],
            [answer for _, answer in load.answers],
        ),
        Result("silence of a stream, p50", quantile(silences, 0.5), "s"),
        Result("silence of a stream, longest", quantile(silences, 1.0), "s"),
        *left_behind(held, unasked),
    ]
