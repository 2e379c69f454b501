"""`baton chaos run --schedule rolling`: every process is restarted in turn, and pools shrink.

One process after another is ended with SIGTERM and restarted while streams run, each after the
previous one is back. Then each pool is scaled down to one worker and up again. The client has both
routers and uses one that reports healthy.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence

from baton_loadtest.chaos.streams.fleet import WORKER_ROLES, Fleet, fleet, hits
from baton_loadtest.chaos.streams.load import Load, client_of, compared_with, left_behind, streams
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, quantile


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process does not end or does not come back."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    wanted = streams(args.seed, args.streams)
    async with fleet(args, routers=2) as running, client_of(running.routers) as stub:
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        load = Load(stub, wanted, args.concurrency)
        async with load.on_and_on():
            restarted = await _restart(running, args.roles, args.rounds)
            scaled = await _scale(running, args.roles, args.hold)
        held = await running.at_rest()
        ended, unasked = running.ended, len(running.unasked)
        touched = hits(running.log)
    lost = [
        answer.silence(hit.first)
        for _, answer in load.answers
        if (hit := touched.get(answer.request_id)) is not None
    ]
    return [
        *(Result(f"restarts of a {role} process", restarted[role], "") for role in args.roles),
        Result("pools scaled down to one and up again", scaled, ""),
        at_most("processes that did not end in order", sum(e.code != 0 for e in ended), "", 0),
        at_most("requests that failed", sum(not a.finished for _, a in load.answers), "", 0),
        Result("requests that began again at another worker", len(lost), ""),
        Result("their longest silence, p99", quantile(lost, 0.99), "s"),
        *compared_with(
            [one for one, _ in load.answers],
            [reference[one.number] for one, _ in load.answers],
            [answer for _, answer in load.answers],
        ),
        *left_behind(held, unasked),
    ]


async def _restart(running: Fleet, roles: Sequence[str], rounds: int) -> Counter[str]:
    """Restarts every process in turn, `rounds` times. Returns the count per role."""
    restarted: Counter[str] = Counter()
    for _ in range(rounds):
        for name in running.names(*roles):
            began = time.monotonic()
            old = running.signal(name, signal.SIGTERM)
            await running.gone(old)
            left = time.monotonic()
            await running.back(old)
            missed_s = time.monotonic() - left
            say(f"{name} left in {left - began:.1f} s and was back {missed_s:.1f} s later")
            restarted[running.spec(name).role] += 1
    return restarted


async def _scale(running: Fleet, roles: Sequence[str], hold_s: float) -> int:
    """Scales each pool down to one worker for hold_s, and up again. Returns the number of pools."""
    pools = [role for role in WORKER_ROLES if role in roles]
    for role in pools:
        leaving = running.names(role)[1:]
        for name in leaving:
            await running.leave(name)
        say(f"one {role} worker is left")
        await asyncio.sleep(hold_s)
        for name in leaving:
            await running.come(name)
    return len(pools)
