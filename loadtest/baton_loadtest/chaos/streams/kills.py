"""`baton chaos run`: random workers are killed with kill -9 while streams run; all stay exact.

First all streams run undisturbed on the same processes, as the reference. Then they run again, and
meanwhile workers are killed in an order given by the seed: of every four, one of each role. The
number of workers down at a time is limited, and never two of a role are down; the next one is
killed when the routers are connected to a successor.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

from baton_loadtest.chaos.streams.fleet import OF_EACH, ROLES, WORKER_ROLES, Fleet, fleet, hits
from baton_loadtest.chaos.streams.load import (
    Answer,
    Load,
    client_of,
    compared_with,
    left_behind,
    streams,
)
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, quantile

RESUME_GOAL_S = 3.0


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process does not come back."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> list[Result]:
    wanted = streams(args.seed, args.streams)
    async with (
        fleet(args, routers=args.routers) as running,
        client_of(running.routers) as stub,
    ):
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        say("and with kills")
        mortal = [role for role in WORKER_ROLES if role in args.roles]
        killer = Killer(running, victims(args.seed, mortal), args.down)
        answers = await killer.amid(Load(stub, wanted, args.concurrency))
        await running.whole()
        held = await running.at_rest()
        touched = hits(running.log)
        unasked = len(running.unasked)
    silences = [
        (hit.roles, answer.silence(hit.first))
        for answer in answers
        if (hit := touched.get(answer.request_id)) is not None
    ]
    return [
        *compared_with(wanted, reference, answers),
        *(Result(f"kills of a {role} worker", killer.kills[role], "") for role in WORKER_ROLES),
        Result("workers down at a time, at most", args.down, ""),
        Result("until a killed worker's successor is in use, p50", quantile(killer.down, 0.5), "s"),
        Result("streams that lost a worker", len(silences), ""),
        *_gaps(silences),
        Result(
            "between events of a stream, undisturbed, p99", quantile(_steady(reference), 0.99), "s"
        ),
        *left_behind(held, unasked),
    ]


def _gaps(silences: list[tuple[set[str], float]]) -> Iterator[Result]:
    every = [gap for _, gap in silences]
    yield Result("resume gap, p50", quantile(every, 0.5), "s")
    yield at_most("resume gap, p99", quantile(every, 0.99), "s", RESUME_GOAL_S)
    yield Result("resume gap, longest", quantile(every, 1.0), "s")
    for role in WORKER_ROLES:
        of_role = [gap for roles, gap in silences if role in roles]
        if not of_role:
            continue
        yield Result(
            f"resume gap of streams that lost a {role} worker, p99", quantile(of_role, 0.99), "s"
        )


def _steady(answers: list[Answer]) -> list[float]:
    return [gap for answer in answers for gap in answer.gaps()]


class Killer:
    """Kills processes. kills: by role. down: seconds for which each process was missing."""

    def __init__(
        self,
        running: Fleet,
        victims: Iterator[str],
        most_down: int,
        before: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """before: awaited with the name of a process that is about to be killed."""
        self._before = before
        self.kills: Counter[str] = Counter()
        self.down: list[float] = []
        self._running = running
        self._victims = victims
        self._places = asyncio.Semaphore(most_down)
        self._roles = {role: asyncio.Lock() for role in ROLES}

    async def amid(self, load: Load) -> list[Answer]:
        """Runs a load's streams once, and kills meanwhile. Returns the answers. Raises Broken if a
        process does not come back."""
        asking = asyncio.create_task(load.once())
        try:
            await load.under_way(asking)
            await self._run(asking)
            return await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _run(self, until: asyncio.Task[list[Answer]]) -> None:
        """Kills until a task is done, then waits until all processes are back. Raises Broken."""
        try:
            async with asyncio.TaskGroup() as group:
                while not until.done():
                    name = next(self._victims)
                    role = self._running.spec(name).role
                    await self._places.acquire()
                    await self._roles[role].acquire()
                    if not until.done():
                        self.kills[role] += 1
                        group.create_task(self._kill(name, role))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _kill(self, name: str, role: str) -> None:
        began = time.monotonic()
        try:
            if self._before is not None:
                await self._before(name)
            # Others are down, so a router counts all workers at hardly any time.
            await self._running.back(self._running.signal(name, signal.SIGKILL), whole=False)
        finally:
            self._roles[role].release()
            self._places.release()
        self.down.append(time.monotonic() - began)


def victims(seed: int, roles: Sequence[str] = WORKER_ROLES) -> Iterator[str]:
    """Yields names of processes endlessly, depending on the seed only; each role equally often."""
    draw = random.Random(f"kills {seed}")
    while True:
        for role in draw.sample(roles, len(roles)):
            yield f"{role}-{draw.randrange(OF_EACH)}"
