"""`baton bench fairness`: what one tenant's flood does to another, with two routers.

First neither tenant has a quota: B asks for a part of what the fleet can do, alone and then beside
each of A's attacks (`attackers`), which want what comes before a place: bytes in the routers'
memory, tokenizers, the routers' time. B must not be refused, and hardly notice.

Then both have the same quota, a part of what the fleet can do. First B alone asks for half of its
quota. Then A asks for ten times its own as well, at both routers: B's objectives must be met all
the same. Last A asks at one router only: it must get all of its quota there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.cli.layout import Layout, UpOptions
from baton.cli.ports import free_row
from baton.core.errors import BatonError
from baton_loadtest.bench.arrivals import ENGINE_CORE, MIB, OTHER_CORE, Arrivals, Phase, stream
from baton_loadtest.bench.attackers import ATTACKS
from baton_loadtest.bench.fleet import fleet
from baton_loadtest.bench.process import say
from baton_loadtest.report import Report, Result, at_most, compared

FLOODS, LIGHT = "a", "b"
QUOTA = 0.3
"""Of what the fleet can do: each tenant's."""

POLITE, NOTICED = 0.25, 1.5
"""Of what the fleet can do: what B asks for beside attacks. Times its first token alone, p99."""

ENDING_S = 60.0
"""That attackers have to tell what they were answered."""

FLOOD, HALF, GREEDY = 10.0, 0.5, 2.0
"""Times the quota: what A asks for with B, what B asks for, what A asks for at one router."""

SETTLING_S = 12.0
"""Until what was saved up is spent, and routers have learnt where a tenant asks now."""

RELOAD_S = 5.0
"""Routers look at the file of keys more often than that."""

ATTAINED, WHOLE = 0.99, 0.95


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError when the fleet answers nothing."""
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    with tempfile.TemporaryDirectory() as folder:
        return Report(asyncio.run(_measure(args, Path(folder, "keys.json"))))


async def _measure(args: argparse.Namespace, keys: Path) -> list[Result]:
    shown = {name: _new_key(keys, name) for name in (FLOODS, LIGHT)}
    headers = [f"authorization: Bearer {key}\r\n" for key in shown.values()]
    http_port, grpc_port = free_row(2), free_row(2)
    options = UpOptions(
        model=args.model,
        transport=args.transport,
        routers=2,
        threads=1,
        http_port=http_port,
        grpc_port=grpc_port,
        engine_cpus=ENGINE_CORE,
        other_cpus=OTHER_CORE,
        router_flags=(
            *("--max-queue-s", str(args.queue_s)),
            *("--keys", str(keys), "--metrics-open", "true"),
        ),
    )
    async with fleet(options) as (layout, supervisor):
        load = Arrivals(args, layout, supervisor, headers)
        capacity = await load.capacity()
        if not capacity:
            raise BatonError("nothing was answered while capacity was looked for")
        polite = stream(POLITE * capacity, 1, (0, 1))
        attacked = []
        for attack in ("", *ATTACKS, ""):
            phase = {"name": attack or "idle", "seconds": args.seconds, "streams": [polite]}
            async with _attacking(layout, attack, shown[FLOODS]):
                attacked += await load.run([phase])
        quota = QUOTA * capacity
        tokens = args.prompt_tokens + args.output_tokens
        for name in (FLOODS, LIGHT):
            _new_key(keys, name, "--tokens-per-minute", str(round(60 * quota * tokens)))
        say(f"each tenant's quota: {quota:.1f} requests/s of {capacity:.1f}")
        await asyncio.sleep(RELOAD_S)
        light = stream(HALF * quota, 1, (0, 1))
        phases = await load.run(
            [
                {"name": "B alone", "seconds": args.seconds, "streams": [light]},
                {"name": "A floods both", "seconds": args.seconds,
                 "streams": [light, stream(FLOOD * quota, 0, (0, 1))]},
                {"name": "A at one router", "seconds": args.seconds,
                 "streams": [stream(GREEDY * quota, 0, (0,))]},
            ]
        )  # fmt: skip
    return [
        Result("capacity", capacity, "requests/s"),
        *_attacks_figures(capacity, attacked),
        *_figures(args, quota, phases),
    ]


@asynccontextmanager
async def _attacking(layout: Layout, attack: str, key: str) -> AsyncIterator[None]:
    """Whoever attacks does so within. attack: "" for none."""
    if not attack:
        yield
        return
    targets = [spec.metrics for spec in layout.processes if spec.role == "router"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "baton_loadtest.bench.attackers", "--attack", attack),
        *("--targets", ",".join(targets), "--key", key),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        yield
        process.stdin.close()
        async with asyncio.timeout(ENDING_S):
            told, _ = await process.communicate()
        say(f"{attack}: A was answered {json.loads(told)['statuses']}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _attacks_figures(capacity: float, phases: list[Phase]) -> list[Result]:
    """Of B alone, before and after, and beside each attack of A. What else the machine did while B
    was alone must not make A look harmless: the quicker time counts."""
    *attacked, after = phases[1:]
    idle = min(phases[0], after, key=lambda phase: phase.first_token(0.99))
    alone = 1000 * idle.first_token(0.99)
    found = [
        Result("B asks for beside attacks", POLITE * capacity, "requests/s"),
        Result("B's first token, p50, idle", 1000 * idle.first_token(0.5), "ms"),
        Result("the routers' memory, idle", _routers_rss(idle), "MiB"),
    ]
    for phase in attacked:
        num_refused = sum(one.status == 429 for one in phase.asked)
        beside = 1000 * phase.first_token(0.99)
        found += [
            at_most(f"B's first token, p99, {phase.name} / idle", beside, "ms", NOTICED, alone),
            at_most(f"B's requests refused, {phase.name}", num_refused, "", 0),
            at_most(f"B's requests failed otherwise, {phase.name}", phase.failed(), "", 0),
            Result(f"the routers' memory, {phase.name}", _routers_rss(phase), "MiB"),
        ]
    return found


def _routers_rss(phase: Phase) -> float:
    """The most that all of them held, in MiB."""
    return sum(size for name, size in phase.rss.items() if name.startswith("router")) / MIB


def _figures(args: argparse.Namespace, quota: float, phases: list[Phase]) -> list[Result]:
    alone, flooded, sticky = phases
    if not _attained(args, alone):
        raise BatonError("nothing that B asked for alone was answered within its objectives")
    before, beside = _attained(args, alone), _attained(args, flooded)
    b_alone, b_beside = _of(alone, 1), _of(flooded, 1)
    return [
        Result("each tenant's quota", quota, "requests/s"),
        Result("B asks for", HALF * quota, "requests/s"),
        Result("A asks for, at both routers", FLOOD * quota, "requests/s"),
        Result("B's requests within their objectives, alone", 100 * before, "%"),
        Result(
            "B's requests within their objectives, beside A", 100 * beside, "%",
            goal=100 * ATTAINED, met=beside >= ATTAINED,
        ),
        compared(
            "B's first token, p99, beside A against alone",
            1000 * b_beside.first_token(0.99), "ms", 1000 * b_alone.first_token(0.99),
        ),
        compared("A gets, at both routers, against its quota", _rate(flooded), "requests/s", quota),
        compared(
            "A gets, at one router, against its quota", _rate(sticky), "requests/s", quota, WHOLE
        ),
        Result("A's refusals, p99", 1000 * _of(flooded, 0).refusal(0.99), "ms"),
        Result("both routers' CPU beside A", flooded.cores("router"), "cores"),
        Result("failed otherwise", sum(phase.failed() for phase in phases), ""),
        Result("the load's own lag, p99", 1000 * max(p.lag(0.99) for p in phases), "ms"),
    ]  # fmt: skip


def _of(phase: Phase, tenant: int) -> Phase:
    return Phase(phase.name, phase.seconds, [one for one in phase.asked if one.tenant == tenant])


def _attained(args: argparse.Namespace, phase: Phase) -> float:
    """Of all that B asked, what was answered within its objectives."""
    asked = _of(phase, 1).asked
    return sum(one.meets(args.first_s, args.between_s) for one in asked) / max(1, len(asked))


def _rate(phase: Phase) -> float:
    """Of A's requests, a second, how many were answered once things had settled."""
    settled = [one for one in phase.asked if one.tenant == 0 and one.at >= SETTLING_S]
    return sum(one.whole for one in settled) / (phase.seconds - SETTLING_S)


def _new_key(file: Path, tenant: str, *limits: str) -> str:
    """As an operator makes one; limits are those of the tenant with all its keys."""
    words = ["keys", "new", "--tenant", tenant, *limits, str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise BatonError(f"no key could be made: {done.stderr.strip()}")
    return done.stdout.strip()
