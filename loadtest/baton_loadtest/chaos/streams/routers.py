"""`baton chaos run --schedule routers`: one of two routers is killed with kill -9, repeatedly.

In every round streams run through both. Those of the killed router end with a retryable error, and
are sent again to the other one, whose streams must not be affected. In a second part of the round
all streams run through the router that is killed, and the workers must release all their resources.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from baton_loadtest.chaos.streams.fleet import PATIENCE_S, POLL_S, WORKER_ROLES, Fleet, fleet
from baton_loadtest.chaos.streams.load import (
    Answer,
    Load,
    Stub,
    Wanted,
    client_of,
    compared_with,
    follow,
    left_behind,
    streams,
)
from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared

FREE_GOAL_S = 3.0
STAYS, DIES = "router-0", "router-1"

Asked = list[tuple[Wanted, Answer]]


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if streams do not start or workers do not release their resources."""
    return asyncio.run(_measure(args))


@dataclass(slots=True)
class Found:
    """The results of all rounds."""

    others: Asked = field(default_factory=list)
    """Streams through the other router."""
    cut: Asked = field(default_factory=list)
    """Streams that ran through the killed router."""
    again: Asked = field(default_factory=list)
    """The same streams, sent again."""
    free_s: list[float] = field(default_factory=list)
    """Seconds from the kill until the workers hold no resources."""


async def _measure(args: argparse.Namespace) -> list[Result]:
    wanted = streams(args.seed, args.streams)
    found = Found()
    async with fleet(args, routers=2) as running, client_of([running.spec(STAYS).grpc]) as stays:
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stays, wanted, args.concurrency).once()
        for number in range(args.rounds):
            say(f"round {number + 1}")
            first = number * args.concurrency
            some = [wanted[(first + i) % len(wanted)] for i in range(args.concurrency)]
            async with client_of([running.spec(DIES).grpc]) as dies:
                await _beside(running, stays, dies, some, found)
            async with client_of([running.spec(DIES).grpc]) as dies:
                await _alone(running, dies, some, found)
        held, unasked = await running.at_rest(), len(running.unasked)
    retryable = sum(answer.failed is grpc.StatusCode.UNAVAILABLE for _, answer in found.cut)
    codes = {answer.failed.name for _, answer in found.cut if answer.failed}
    say(f"the killed router's clients were told {', '.join(sorted(codes))}")
    ended = found.others + found.again
    return [
        Result("router replicas killed", 2 * args.rounds, ""),
        compared("streams cut, and told to try again", retryable, "", len(found.cut), 1.0),
        at_most("until workers held nothing of it, longest", max(found.free_s), "s", FREE_GOAL_S),
        Result("streams of the other router", len(found.others), ""),
        Result("streams asked again at the other router", len(found.again), ""),
        *compared_with(
            [one for one, _ in ended],
            [reference[one.number] for one, _ in ended],
            [answer for _, answer in ended],
        ),
        *left_behind(held, unasked),
    ]


async def _beside(
    running: Fleet, stays: Stub, dies: Stub, some: Sequence[Wanted], found: Found
) -> None:
    """Runs half of the streams through each router."""
    others, cut = _ask(stays, some[::2]), _ask(dies, some[1::2])
    await _under_way(others + cut)
    old = running.signal(DIES, signal.SIGKILL)
    lost = await _ended(cut)
    found.cut += [pair for pair in lost if pair[1].failed]
    found.others += [pair for pair in lost if not pair[1].failed]
    found.again += await _ended(_ask(stays, [one for one, answer in lost if answer.failed]))
    found.others += await _ended(others)
    await running.back(old)


async def _alone(running: Fleet, dies: Stub, some: Sequence[Wanted], found: Found) -> None:
    """Runs all streams through the router that is killed."""
    cut = _ask(dies, some)
    await _under_way(cut)
    old, killed = running.signal(DIES, signal.SIGKILL), time.monotonic()
    workers = running.names(*WORKER_ROLES)
    while await running.held(*workers):
        if time.monotonic() - killed > PATIENCE_S:
            raise Broken("workers keep what a killed router had them do")
        await asyncio.sleep(POLL_S / 4)
    found.free_s.append(time.monotonic() - killed)
    lost = await _ended(cut)
    found.cut += [pair for pair in lost if pair[1].failed]
    found.others += [pair for pair in lost if not pair[1].failed]
    await running.back(old)


Running = list[tuple[Wanted, Answer, asyncio.Task[None]]]


def _ask(stub: Stub, some: Sequence[Wanted]) -> Running:
    answers = [(one, Answer([time.monotonic()])) for one in some]
    return [
        (one, answer, asyncio.create_task(follow(stub, one, answer))) for one, answer in answers
    ]


async def _under_way(asked: Running) -> None:
    """Returns when every stream has tokens. Raises Broken."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(answer.tokens or task.done() for _, answer, task in asked):
        if time.monotonic() > deadline:
            raise Broken("streams did not get under way")
        await asyncio.sleep(POLL_S / 4)


async def _ended(asked: Running) -> Asked:
    for _, _, task in asked:
        await task
    return [(one, answer) for one, answer, _ in asked]
