"""`baton bench fairness`: how much one tenant's flood slows another tenant, with two routers.

First neither tenant has a quota. B uses a part of the fleet's capacity, alone and then beside each
of A's attacks, which exhaust resources used before a request is queued: memory in the routers,
tokenizers, the routers' CPU time. B must not be refused, and must hardly be slower.

Then both have the same quota, a part of the capacity. First B alone uses half of its quota. Then A
also sends ten times its quota, to both routers: B must still meet its objectives. Last A uses one
router only: it must get all of its quota there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from baton_loadtest.bench.options import option
from baton_loadtest.bench.overload import LOAD_OPTIONS, MIB, FleetLoad, Phase, Stream, StreamLoad
from baton_loadtest.child import answer
from baton_loadtest.drive import ANSWERED, HttpLoadClient
from baton_loadtest.launch import fleet, peer, say, stay_off_the_engine
from baton_loadtest.report import Report, Result, at_most, compared, ms
from batonlm.cli.access import Access
from batonlm.cli.http_client import ConnectionLost
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError

PLOTS = False
OPTIONS = (*LOAD_OPTIONS, option("--seconds", 40.0, "of each load"))

QUOTA = 0.3
"""Each tenant's, as a share of the fleet's capacity."""

POLITE, NOTICED = 0.25, 1.5
"""B's rate beside attacks, as a share of the capacity; and the maximum ratio of its p99 time to
first token to that alone."""

FLOOD, HALF, GREEDY = 10.0, 0.5, 2.0
"""Multiples of the quota: A's rate beside B, B's rate, and A's rate at one router."""

SETTLING_S = 12.0
"""Until saved-up quota is spent, and routers know which routers a tenant uses."""

RELOAD_S = 5.0
"""Longer than the interval at which routers reload the file of keys."""

ATTAINED, WHOLE = 0.99, 0.95

ATTACKS = {"prompts": 14, "faults": 14, "texts": 60}
"""Connections of each attack: as many as were once enough to starve all others."""

LONGEST_BYTES = (1 << 20) - 1024
"""The size of a text that fits into a request's body."""

TOO_LONG_BYTES = 1 << 16
PAUSE_S = 0.05
"""Before a lost connection is opened again."""

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "so", "on")


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if the fleet answers nothing."""
    stay_off_the_engine()
    with tempfile.TemporaryDirectory() as folder:
        return Report(asyncio.run(_measure(args, Path(folder, "keys.json"))))


async def _measure(args: argparse.Namespace, keys: Path) -> list[Result]:
    key_a, key_b = _new_key(keys, "a"), _new_key(keys, "b")
    options = UpOptions(
        model=args.model,
        transport=args.transport,
        routers=2,
        router_flags=(
            *("--max-queue-s", str(args.queue_s)),
            *("--keys", str(keys)),
        ),
    )
    async with fleet(options, pin=True) as running:
        load = FleetLoad(args, running, key_a)
        capacity = await load.capacity()
        polite = Stream(POLITE * capacity, key_b, (0, 1))
        idle = [await load.phase("idle", args.seconds, streams=[polite])]
        attacked = []
        for attack in ATTACKS:
            async with peer(attackers) as enemy:
                await enemy.ask(routers=running.routers, attack=attack, key=key_a)
                attacked.append(await load.phase(attack, args.seconds, streams=[polite]))
                say(f"{attack}: A was answered {await enemy.ask()}")
        idle.append(await load.phase("idle", args.seconds, streams=[polite]))
        quota = QUOTA * capacity
        tokens = round(60 * quota * (args.prompt_tokens + args.output_tokens))
        for tenant in ("a", "b"):
            _new_key(keys, tenant, "--tokens-per-minute", str(tokens))
        say(f"each tenant's quota: {quota:.1f} requests/s of {capacity:.1f}")
        await asyncio.sleep(RELOAD_S)
        light = Stream(HALF * quota, key_b, (0, 1))
        flood, greedy = Stream(FLOOD * quota, key_a, (0, 1)), Stream(GREEDY * quota, key_a, (0,))
        alone = await load.phase("B alone", args.seconds, streams=[light])
        flooded = await load.phase("A floods both", args.seconds, streams=[light, flood])
        sticky = await load.phase("A at one router", args.seconds, streams=[greedy])
    return [
        Result("capacity", capacity, "requests/s"),
        *_attacks_figures(capacity, idle, attacked),
        *_quota_figures(args, quota, alone, flooded, sticky),
    ]


def _attacks_figures(capacity: float, idle: list[Phase], attacked: list[Phase]) -> list[Result]:
    """Compares B alone, before and after, with B beside each attack of A. The shorter time alone
    counts, so that other load on the machine does not hide an attack's effect."""
    before = min(idle, key=lambda phase: phase.whole.first_token_ms(0.99))
    alone = before.whole
    found = [
        Result("B asks for beside attacks", POLITE * capacity, "requests/s"),
        Result("B's first token, p50, idle", alone.first_token_ms(0.5), "ms"),
        Result("the routers' memory, idle", _routers_rss(before), "MiB"),
    ]
    for phase in attacked:
        whole, name = phase.whole, phase.name
        found += [
            at_most(
                f"B's first token, p99, {name} / idle",
                whole.first_token_ms(0.99),
                "ms",
                NOTICED,
                alone.first_token_ms(0.99),
            ),
            at_most(f"B's requests refused, {name}", whole.refused, "", 0),
            at_most(f"B's requests failed otherwise, {name}", whole.failed, "", 0),
            Result(f"the routers' memory, {name}", _routers_rss(phase), "MiB"),
        ]
    return found


def _routers_rss(phase: Phase) -> float:
    """Returns the maximum memory of all routers, in MiB."""
    return sum(size for name, size in phase.rss.items() if name.startswith("router")) / MIB


def _quota_figures(
    args: argparse.Namespace, quota: float, alone: Phase, flooded: Phase, sticky: Phase
) -> list[Result]:
    (b_alone,), (b_beside, a_both), (a_one,) = alone.streams, flooded.streams, sticky.streams
    before, beside = (one.met(args) / max(1, len(one.samples)) for one in (b_alone, b_beside))
    if not before:
        raise BatonError("nothing that B asked for alone was answered within its objectives")
    phases = (alone, flooded, sticky)

    def rate(stream: StreamLoad) -> float:
        """Requests per second that were answered after the settling time."""
        settled = [one for one in stream.samples if one.due_s >= SETTLING_S]
        answered = sum(one.end == ANSWERED for one in settled)
        return answered / float(args.seconds - SETTLING_S)

    return [
        Result("each tenant's quota", quota, "requests/s"),
        Result("B asks for", HALF * quota, "requests/s"),
        Result("A asks for, at both routers", FLOOD * quota, "requests/s"),
        Result("B's requests within their objectives, alone", 100 * before, "%"),
        Result(
            "B's requests within their objectives, beside A",
            100 * beside,
            "%",
            goal=100 * ATTAINED,
            met=beside >= ATTAINED,
        ),
        compared(
            "B's first token, p99, beside A against alone",
            b_beside.first_token_ms(0.99),
            "ms",
            b_alone.first_token_ms(0.99),
        ),
        compared("A gets, at both routers, against its quota", rate(a_both), "requests/s", quota),
        compared(
            "A gets, at one router, against its quota", rate(a_one), "requests/s", quota, WHOLE
        ),
        Result("A's refusals, p99", ms(a_both.refusals_s, 0.99), "ms"),
        Result("both routers' CPU beside A", flooded.cores("router"), "cores"),
        Result("failed otherwise", sum(phase.whole.failed for phase in phases), ""),
        Result("the load's own lag, p99", max(p.whole.lag_ms(0.99) for p in phases), "ms"),
    ]


def _new_key(file: Path, tenant: str, *limits: str) -> str:
    """Creates a key as an operator does; limits are those of the tenant with all its keys."""
    words = ["keys", "new", "--tenant", tenant, *limits, str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "batonlm.cli.main", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise BatonError(f"no key could be made: {done.stderr.strip()}")
    return done.stdout.strip()


async def attackers() -> None:
    """Connections of one tenant that use more than its share: each sends the next request at once,
    and ignores Retry-After.

    They stand for other machines, and have the lowest CPU priority. The first command has routers
    (host:port of each), attack and key; the second is answered with the number of answers by
    status.

        prompts   the longest prompts that fit into a body
        faults    half of them too long for the model, half with a new invalid grammar each time
        texts     the longest texts, to /tokenize
    """
    os.nice(19)
    statuses: Counter[int] = Counter()
    tasks: list[asyncio.Task[None]] = []

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        if not command:
            return {str(status): count for status, count in statuses.items()}
        for number in range(ATTACKS[command["attack"]]):
            router = command["routers"][number % len(command["routers"])]
            client = HttpLoadClient(Access(router, key=command["key"]))
            attack = _attack(client, command["attack"], random.Random(number), statuses)
            tasks.append(asyncio.create_task(attack))
        return {}

    try:
        await answer(handle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _attack(
    client: HttpLoadClient, attack: str, draw: random.Random, statuses: Counter[int]
) -> None:
    while True:
        try:
            request = client.post(*_attack_of(attack, draw))
            statuses[(await client.send(request, lambda _: None)).status] += 1
        except (OSError, BatonError, ConnectionLost):
            statuses[0] += 1
            await asyncio.sleep(PAUSE_S)


def _attack_of(attack: str, draw: random.Random) -> tuple[str, dict[str, Any]]:
    if attack == "prompts":
        return "/v1/completions", {"prompt": _text(draw, LONGEST_BYTES)}
    if attack == "texts":
        return "/tokenize", {"prompt": _text(draw, LONGEST_BYTES)}
    if draw.random() < 0.5:
        return "/v1/completions", {"prompt": _text(draw, TOO_LONG_BYTES)}
    grammar = {"regex": f"({draw.getrandbits(64)}"}
    return "/v1/completions", {"prompt": "x", "structured_outputs": grammar}


def _text(draw: random.Random, size: int) -> str:
    """Every text is different, so that none is cached."""
    start = " ".join(draw.choices(WORDS, k=512))
    return (start * (size // len(start) + 1))[:size]
