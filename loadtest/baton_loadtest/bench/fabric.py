"""`baton bench fabric`: what it saves to collect prefixes from other workers' caches.

Users hold the conversations of Mooncake's trace, scaled down, with four decode workers that run a
real model. Users are more than the workers' places, so the worker that has a conversation's KV is
often full when its next turn comes, and no worker's pool holds what all users are at. The same
requests run three times: no request shares KV with another; each worker finds what is in its own
cache; and it also collects what another one has. Every answer must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from baton_loadtest import traces
from baton_loadtest.bench import engines
from baton_loadtest.bench.options import SHAPES, TRANSPORT, option
from baton_loadtest.drive import (
    ORDINARY,
    GrpcLoadClient,
    Ids,
    Sample,
    TokenIds,
    all_answered,
    follow,
)
from baton_loadtest.launch import RunningBaton, check_cpu_clock, fleet, say
from baton_loadtest.load.scenario import pieces_of
from baton_loadtest.report import Bars, Report, Result, at_most, compared, ms
from baton_loadtest.traces import BLOCK, Recorded
from batonlm.cli.access import Access
from batonlm.cli.layout import UpOptions
from batonlm.core.errors import BatonError, InvalidArgument

PLOTS = True
OPTIONS = (
    TRANSPORT,
    option("--trace", None, "Mooncake's conversation trace", type=Path, required=True),
    option("--shape", "8m", SHAPES),
    option("--block-tokens", 32, f"of each of the trace's blocks of {BLOCK}"),
    option("--most-tokens", 1900, "of a prompt; longer ones are cut"),
    option("--conversations", 32),
    option("--turns", 4, "that a conversation has at least"),
    option("--users", 20, "each with one conversation at a time"),
    option("--workers", 4),
    option("--running", 2, "sequences at once on a worker"),
    option("--kv-mib", 24, "of a worker's pool"),
)

FEWER, SOONER = 2.0, 1.5
"""Goals against each worker's own cache: computed prompt tokens, and the median first token."""

COMMON_BLOCKS = 1
"""The trace's requests all begin with the same block."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of a conversation."""

    prompt: Ids
    output_tokens: int


Conversation = Sequence[Exchange]


@dataclass(slots=True)
class Side:
    """The results of one run."""

    samples: list[Sample]
    """By conversation and turn."""
    computed: float
    """Prompt tokens."""
    found: float
    """Prompt tokens that were in the worker's cache when it began, collected ones included."""
    collected: float
    cpu_s: float
    """Of all processes of Baton."""
    took_s: float
    outcomes: dict[str, float]
    """Collections, by how they ended."""

    @property
    def first_s(self) -> list[float]:
        return [one.first_s - one.due_s for one in self.samples]


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if answers differ between the runs, or a request fails."""
    check_cpu_clock()
    talks = conversations(traces.read(args.trace).requests, args)
    requests = sum(map(len, talks))
    tokens = sum(len(turn.prompt) for talk in talks for turn in talk)
    sides = {}
    for name, collect, shared in (
        ("nothing shared", 0, False),
        ("own", 0, True),
        ("any", -1, True),
    ):
        say(f"{name}: {requests} requests")
        with TemporaryDirectory() as empty:
            model = engines.with_tokenizer(engines.folder(args.shape), Path(empty))
            sides[name] = asyncio.run(_side(args, model, talks, collect, shared))
    alone, own, anywhere = sides.values()
    if (
        not [s.ids for s in alone.samples]
        == [s.ids for s in own.samples]
        == [s.ids for s in anywhere.samples]
    ):
        raise BatonError("a prompt whose KV came from elsewhere gave another answer")

    def share(part: float) -> float:
        return 100 * part / tokens

    return Report(
        [
            Result("conversations", len(talks), ""),
            Result("requests, all with the same answers on all sides", requests, ""),
            Result("prompt tokens", tokens, ""),
            Result("computed, nothing shared", alone.computed, "tokens"),
            Result("computed, own cache only", own.computed, "tokens"),
            compared(
                "fewer computed: own cache only against any worker's",
                own.computed,
                "tokens",
                anywhere.computed,
                FEWER,
            ),
            Result("found, own cache only", share(own.found), "%"),
            Result("found, any: in its own cache", share(anywhere.found - anywhere.collected), "%"),
            Result("found, any: collected", share(anywhere.collected), "%"),
            *(
                Result(f"collections that ended {outcome}", number, "")
                for outcome, number in sorted(anywhere.outcomes.items())
                if number
            ),
            Result("first token, p50, nothing shared", ms(alone.first_s, 0.5), "ms"),
            compared(
                "first token, p50: own cache only against any worker's",
                ms(own.first_s, 0.5),
                "ms",
                ms(anywhere.first_s, 0.5),
                SOONER,
            ),
            compared(
                "first token, p90: own cache only against any worker's",
                ms(own.first_s, 0.9),
                "ms",
                ms(anywhere.first_s, 0.9),
            ),
            Result("processor time of a request, nothing shared", alone.cpu_s / requests, "s"),
            at_most(
                "processor time of a request, any worker's against own cache only",
                anywhere.cpu_s / requests,
                "s",
                1.0,
                own.cpu_s / requests,
            ),
            compared("time until all ended, own against any", own.took_s, "s", anywhere.took_s),
        ],
        (
            Bars("computed", "tokens", tuple((n, side.computed) for n, side in sides.items())),
            Bars(
                "first token, p50", "ms", tuple((n, ms(s.first_s, 0.5)) for n, s in sides.items())
            ),
        ),
    )


def conversations(trace: Iterable[Recorded], args: argparse.Namespace) -> list[Conversation]:
    """Returns the first conversations of a trace that have enough turns. A request goes on with the
    last one before it that has more of its first blocks than those that all have.

    Raises InvalidArgument for a trace without blocks, or with too few conversations.
    """
    newest: dict[int, int] = {}
    """Which conversation last had a block."""
    found: list[list[tuple[int, Recorded]]] = []
    for number, request in enumerate(trace):
        shared = 0
        while shared < len(request.blocks) and request.blocks[shared] in newest:
            shared += 1
        if shared > COMMON_BLOCKS:
            talk = newest[request.blocks[shared - 1]]
        else:
            talk = len(found)
            found.append([])
        found[talk].append((number, request))
        newest.update(dict.fromkeys(request.blocks, talk))
    long = [talk for talk in found if len(talk) >= args.turns][: args.conversations]
    if len(long) < args.conversations:
        raise InvalidArgument(f"has only {len(long)} such conversations", field="trace")
    ids, scale = TokenIds(args.seed, *ORDINARY), args.block_tokens / BLOCK
    return [
        [
            Exchange(
                ids.prompt(pieces_of(request, number, scale))[: args.most_tokens],
                max(1, round(request.output_tokens * scale)),
            )
            for number, request in talk
        ]
        for talk in long
    ]


async def _side(
    args: argparse.Namespace,
    model: Path,
    talks: Sequence[Conversation],
    collect: int,
    shared: bool,
) -> Side:
    options = UpOptions(
        model=str(model),
        prefill=0,
        decode=args.workers,
        threads=1,
        transport=args.transport,
        kv_memory_mib=args.kv_mib,
        engine_flags=("--max-running", str(args.running)),
        router_flags=("--collect-prefix-tokens", str(collect)),
    )
    async with fleet(options) as running:
        await _drive(running, talks[:1] * args.workers, args, shared=False, name="warm")
        before, spent = await _totals(running), sum(running.spent_s().values())
        began = time.perf_counter()
        samples = await _drive(running, talks, args, shared=shared, name="turn")
        took_s = time.perf_counter() - began
        cpu_s = sum(running.spent_s().values()) - spent
        after = await _totals(running)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def total(name: str) -> float:
        return sum(value for key, value in gained.items() if key.partition("{")[0] == name)

    collects = "baton_prefix_collects_total"
    return Side(
        samples,
        total("baton_prefill_tokens_total"),
        total("baton_cached_tokens_total"),
        total("baton_prefix_collected_tokens_total"),
        cpu_s,
        took_s,
        {key.split('"')[1]: value for key, value in gained.items() if key.startswith(collects)},
    )


async def _drive(
    running: RunningBaton,
    talks: Sequence[Conversation],
    args: argparse.Namespace,
    *,
    shared: bool,
    name: str,
) -> list[Sample]:
    """Each user holds one conversation after the other. Returns all samples, by conversation.

    shared: whether requests may find one another's KV; else each is its own tenant's.
    """
    began = time.perf_counter()
    found: dict[tuple[int, int], Sample] = {}
    waiting = iter(enumerate(talks))

    async def talk(client: GrpcLoadClient) -> None:
        for number, turns in waiting:
            for place, turn in enumerate(turns):
                request = client.prepare(turn.prompt, turn.output_tokens)
                if not shared:
                    request.options.cache_salt = f"{name} {number} {place}"
                found[number, place] = await follow(client, request, began)

    async with GrpcLoadClient(Access(running.layout.grpc)) as client, asyncio.TaskGroup() as group:
        for _ in range(args.users):
            group.create_task(talk(client))
    return all_answered([found[key] for key in sorted(found)])


async def _totals(running: RunningBaton) -> dict[str, float]:
    """Returns the metrics of all workers, added up."""
    added: dict[str, float] = {}
    for name in running.pids("decode"):
        for key, value in (await running.metrics(name)).items():
            added[key] = added.get(key, 0.0) + value
    return added
