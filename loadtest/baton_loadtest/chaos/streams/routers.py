"""`baton chaos run --schedule routers`: routers are killed with kill -9, and their clients go on.

First all streams run undisturbed, as the reference. Then they run again through two routers with
clients that resume them (`follow_on`), and meanwhile processes of all roles are killed, as by the
schedule `kills`; of every six, two are routers. At the end another tenant's client shows the ids of
these streams, and must get nothing.

In a second part, repeated, all streams run through one router without being resumed, the router is
killed, and the workers must release all their resources.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import grpc

from baton_loadtest.chaos.streams.fleet import (
    BUSY,
    OF_EACH,
    PATIENCE_S,
    POLL_S,
    ROLES,
    WORKER_ROLES,
    Fleet,
    fleet,
    records,
)
from baton_loadtest.chaos.streams.kills import RESUME_GOAL_S, Killer, victims
from baton_loadtest.chaos.streams.load import (
    Answer,
    Load,
    Stub,
    Wanted,
    client_of,
    compared_with,
    follow,
    follow_on,
    left_behind,
    streams,
)
from baton_loadtest.chaos.world import Broken
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared, quantile
from batonlm.cli.http_client import total
from batonlm.core.admission.api_keys import KeyBook, TenantLimits, render

FREE_GOAL_S = 3.0
DIES = "router-1"


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken if a process does not come back, streams do not start, or workers do not
    release their resources."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(args, Path(folder, "keys.json")))


class Adoptions:
    """What became of the choices of streams that went on at another router, over all processes of
    routers."""

    def __init__(self, running: Fleet) -> None:
        self._running = running
        self._counts: Counter[str] = Counter()

    async def count(self, name: str) -> None:
        """Adds what a router has counted, before it is killed or at the end."""
        if self._running.spec(name).role != "router":
            return
        # A router that does not serve yet has counted nothing.
        with suppress(OSError):
            found = await self._running.metrics(name)
            for outcome in ("adopted", "tokens", "none", "failed"):
                count = total(found, "baton_adoptions_total", f'outcome="{outcome}"')
                self._counts[outcome] += round(count)

    def shares(self) -> Iterator[Result]:
        looked_for = self._counts.total()
        for outcome, what in (
            ("adopted", "adopted where they ran"),
            ("tokens", "gone on from their tokens"),
        ):
            yield compared(f"choices that were {what}", self._counts[outcome], "", looked_for)
        again = self._counts["none"] + self._counts["failed"]
        yield compared("choices that were computed again", again, "", looked_for)


class Cause(Enum):
    """What happened in the longest silence of a stream that lost its router; the first one of these
    that did. The value is its name in tables."""

    OFTEN = "that lost the next router in it, too"
    AGAIN = "that were computed again in it"
    WORKER = "that lost a worker in it"
    NOTHING = "in which nothing else happened"


def causes(log: Path, answers: Sequence[Answer]) -> dict[Cause, list[float]]:
    """Returns the longest silences, by cause, of the streams that lost their router.

    log: of the routers, which says of each request what it lost and what was adopted.
    """
    happened: dict[str, list[tuple[float, Cause]]] = {}
    for at, record in records(log):
        if record.get("adoption") in ("none", "failed"):
            happened.setdefault(record["request_id"], []).append((at, Cause.AGAIN))
        elif record.get("lost_at") and record["reason"] != BUSY:
            happened.setdefault(record["request_id"], []).append((at, Cause.WORKER))
    found: dict[Cause, list[float]] = {cause: [] for cause in Cause}
    for answer in answers:
        if not answer.losses:
            continue
        began, ended = answer.longest_silence(answer.losses[0])
        seen = {
            cause
            for request_id in (answer.request_id, *answer.later_ids)
            for at, cause in happened.get(request_id, ())
            if began <= at <= ended
        }
        if sum(began <= at <= ended for at in answer.losses) > 1:
            seen.add(Cause.OFTEN)
        first = next((cause for cause in Cause if cause in seen), Cause.NOTHING)
        found[first].append(ended - began)
        if ended - began > RESUME_GOAL_S:
            names = ", ".join((answer.request_id, *answer.later_ids))
            say(f"{ended - began:.1f} s of silence in a stream {first.value}: requests {names}")
    return found


def _by_cause(found: dict[Cause, list[float]]) -> Iterator[Result]:
    for cause, gaps in found.items():
        yield Result(f"streams {cause.value}", len(gaps), "")
        if gaps:
            yield Result(f"resume gap of streams {cause.value}, p50", quantile(gaps, 0.5), "s")
            yield Result(f"resume gap of streams {cause.value}, longest", max(gaps), "s")


@dataclass(slots=True)
class Released:
    """The results of the second part."""

    cut: list[Answer] = field(default_factory=list)
    """Streams that the killed router cut."""
    free_s: list[float] = field(default_factory=list)
    """Seconds from the kill until the workers hold no resources."""


async def _measure(args: argparse.Namespace, keys: Path) -> list[Result]:
    wanted = streams(args.seed, args.streams)
    own, anothers = _new_keys(keys)
    mortal = [role for role in ROLES if role in args.roles]
    released = Released()
    async with (
        fleet(args, routers=OF_EACH, keys=str(keys)) as running,
        client_of(running.routers, own) as stub,
        client_of(running.routers, anothers) as stranger,
    ):
        say(f"{len(wanted)} streams undisturbed")
        reference = await Load(stub, wanted, args.concurrency).once()
        say("and with kills")
        adoptions = Adoptions(running)
        # A router is back soon, so that their turn comes twice as often.
        turns = [*mortal, *(role for role in mortal if role == "router")]
        killer = Killer(running, victims(args.seed, turns), args.down, adoptions.count)
        answers = await killer.amid(Load(stub, wanted, args.concurrency, follow_on))
        await running.whole()
        for name in running.names("router"):
            await adoptions.count(name)
        say("the same ids, shown by another tenant")
        refused = sum(
            [await _is_refused(stranger, *pair) for pair in zip(wanted, answers, strict=True)]
        )
        for number in range(args.rounds):
            say(f"round {number + 1} of one router alone")
            first = number * args.concurrency
            some = [wanted[(first + i) % len(wanted)] for i in range(args.concurrency)]
            async with client_of([running.spec(DIES).grpc], own) as dies:
                await _alone(running, dies, some, released)
        held, unasked = await running.at_rest(*ROLES), len(running.unasked)
        by_cause = causes(running.log, answers)
    retryable = sum(answer.failed is grpc.StatusCode.UNAVAILABLE for answer in released.cut)
    gaps = [answer.silence(answer.losses[0]) for answer in answers if answer.losses]
    steady = [gap for answer in reference for gap in answer.gaps()]
    return [
        *compared_with(wanted, reference, answers),
        *(Result(f"kills of a {role} process", killer.kills[role], "") for role in mortal),
        Result("processes down at a time, at most", args.down, ""),
        Result(
            "until a killed process's successor is in use, p50", quantile(killer.down, 0.5), "s"
        ),
        Result("streams that lost their router", len(gaps), ""),
        Result("of these, more than once", sum(len(a.losses) > 1 for a in answers), ""),
        *adoptions.shares(),
        Result("resume gap, p50", quantile(gaps, 0.5), "s"),
        at_most("resume gap, p99", quantile(gaps, 0.99), "s", RESUME_GOAL_S),
        Result("resume gap, longest", quantile(gaps, 1.0), "s"),
        *_by_cause(by_cause),
        Result("between events of a stream, undisturbed, p99", quantile(steady, 0.99), "s"),
        compared("refused when another tenant shows their ids", refused, "", len(answers), 1.0),
        Result("routers killed while all streams were theirs", args.rounds, ""),
        compared("streams cut, and told to try again", retryable, "", len(released.cut), 1.0),
        at_most(
            "until workers held nothing of it, longest", max(released.free_s), "s", FREE_GOAL_S
        ),
        *left_behind(held, unasked),
    ]


def _new_keys(file: Path) -> tuple[str, str]:
    """Writes a file of the keys of two tenants, and returns these."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    book, own = KeyBook().with_key("own", TenantLimits(), now)
    book, anothers = book.with_key("another", TenantLimits(), now)
    file.write_text(render(book))
    return own, anothers


async def _is_refused(stranger: Stub, wanted: Wanted, answer: Answer) -> bool:
    """Returns whether another tenant's client is refused with the id of an event of a stream."""
    one = Wanted(wanted.number, wanted.kind, type(wanted.request)())
    one.request.CopyFrom(wanted.request)
    one.request.options.last_event_id = answer.event_id
    shown = Answer([time.monotonic()])
    await follow(stranger, one, shown)
    return shown.failed is grpc.StatusCode.INVALID_ARGUMENT and not shown.request_id


async def _alone(running: Fleet, dies: Stub, some: Sequence[Wanted], released: Released) -> None:
    """Runs all streams through the router that is killed."""
    answers = [Answer([time.monotonic()]) for _ in some]
    tasks = [
        asyncio.create_task(follow(dies, one, answer))
        for one, answer in zip(some, answers, strict=True)
    ]
    await _under_way(answers, tasks)
    old, killed = running.signal(DIES, signal.SIGKILL), time.monotonic()
    workers = running.names(*WORKER_ROLES)
    while await running.held(*workers):
        if time.monotonic() - killed > PATIENCE_S:
            raise Broken("workers keep what a killed router had them do")
        await asyncio.sleep(POLL_S / 4)
    released.free_s.append(time.monotonic() - killed)
    await asyncio.gather(*tasks)
    released.cut += [answer for answer in answers if answer.failed]
    await running.back(old)


async def _under_way(answers: Sequence[Answer], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Returns when every stream has tokens. Raises Broken."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(
        answer.tokens or task.done() for answer, task in zip(answers, tasks, strict=True)
    ):
        if time.monotonic() > deadline:
            raise Broken("streams did not get under way")
        await asyncio.sleep(POLL_S / 4)
