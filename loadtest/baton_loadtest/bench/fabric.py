"""`baton bench fabric`: what it saves to get prefixes from other workers' caches and from tiers.

Users hold the conversations of Mooncake's trace, scaled down, with four decode workers that run a
real model. Users are more than the workers' places, so the worker that has a conversation's KV is
often full when its next turn comes, and all workers' pools together hold less than what the users
are at. The same requests run four times: no request shares KV with another; each worker finds what
is in its own cache; it also collects what another one has; and what its pool has no room for goes
to host memory, a folder of its own, and a folder that all workers share. Every answer must be the
same.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from baton_loadtest import traces
from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import BLOCK_SIZE
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
from batonlm.cli.layout import Layout, UpOptions
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.kvcache.cache_events import TIERS

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
    option("--host-mib", 16, "of host memory behind a worker's pool"),
    option("--disk-mib", 32, "of a folder behind that, the worker's own"),
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
    restored: dict[str, float]
    """Those of the found ones that came from tiers, by tier."""
    cpu_s: float
    """Of all processes of Baton."""
    took_s: float
    outcomes: dict[str, float]
    """Collections, by how they ended."""

    @property
    def first_s(self) -> list[float]:
        return [one.first_s - one.due_s for one in self.samples]

    @property
    def answers(self) -> list[list[int]]:
        return [one.ids for one in self.samples]

    @property
    def sources(self) -> dict[str, float]:
        """Where found tokens came from. What came and was evicted before its use is counted where
        it came from, and then as computed."""
        elsewhere = self.collected + sum(self.restored.values())
        return {
            "own cache": self.found - elsewhere,
            "another worker's": self.collected,
            **{f"tier {tier}": number for tier, number in self.restored.items()},
        }


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the requests of one run may find."""

    name: str
    own: bool = True
    """One another's KV in a worker's cache; else each request is its own tenant's."""
    any_worker: bool = True
    """Also that of other workers."""
    tiers: bool = False
    """Also what pools have no room for."""


OWN = Sharing("own cache only", any_worker=False)
SIDES = (
    Sharing("nothing shared", own=False, any_worker=False),
    OWN,
    Sharing("any worker's"),
    Sharing("any worker's and tiers", tiers=True),
)


def measure(args: argparse.Namespace) -> Report:
    """Raises BatonError if answers differ between the runs, or a request fails."""
    check_cpu_clock()
    talks = conversations(traces.read(args.trace).requests, args)
    requests = sum(map(len, talks))
    tokens = sum(len(turn.prompt) for talk in talks for turn in talk)
    sides: dict[Sharing, Side] = {}
    for sharing in SIDES:
        say(f"{sharing.name}: {requests} requests")
        with TemporaryDirectory() as empty, TemporaryDirectory() as kv:
            model = engines.with_tokenizer(engines.folder(args.shape), Path(empty))
            sides[sharing] = asyncio.run(_side(args, model, talks, sharing, Path(kv)))
    own = sides[OWN]
    if any(
        [s.ids for s in side.samples] != [s.ids for s in own.samples] for side in sides.values()
    ):
        raise BatonError("a prompt whose KV came from elsewhere gave another answer")
    least = distinct(talks)
    rivals = {sharing.name: side for sharing, side in sides.items() if sharing.any_worker}
    return Report(
        [
            Result("conversations", len(talks), ""),
            Result("requests, all with the same answers on all sides", requests, ""),
            Result("prompt tokens", tokens, ""),
            Result("prompt tokens that nothing can save", least, "tokens"),
            *(
                Result(f"computed, {sharing.name}", side.computed, "tokens")
                for sharing, side in sides.items()
            ),
            *(
                compared(
                    f"fewer computed: own cache only against {name}",
                    own.computed,
                    "tokens",
                    side.computed,
                    FEWER,
                )
                for name, side in rivals.items()
            ),
            *(
                Result(f"found, {sharing.name}: {source}", 100 * number / tokens, "%")
                for sharing, side in sides.items()
                if sharing.own
                for source, number in side.sources.items()
                if number or sharing.any_worker
            ),
            *(
                Result(f"collections that ended {outcome}, {name}", number, "")
                for name, side in rivals.items()
                for outcome, number in sorted(side.outcomes.items())
                if number
            ),
            *(
                Result(f"first token, p50, {sharing.name}", ms(side.first_s, 0.5), "ms")
                for sharing, side in sides.items()
                if not sharing.own
            ),
            *(
                compared(
                    f"first token, p{round(100 * share)}: own cache only against {name}",
                    ms(own.first_s, share),
                    "ms",
                    ms(side.first_s, share),
                    SOONER if share == 0.5 else None,
                )
                for share in (0.5, 0.9)
                for name, side in rivals.items()
            ),
            *(
                Result(f"processor time of a request, {sharing.name}", side.cpu_s / requests, "s")
                for sharing, side in sides.items()
                if not sharing.any_worker
            ),
            *(
                at_most(
                    f"processor time of a request, {name} against own cache only",
                    side.cpu_s / requests,
                    "s",
                    1.0,
                    own.cpu_s / requests,
                )
                for name, side in rivals.items()
            ),
            *(
                compared(
                    f"time until all ended, own cache only against {name}",
                    own.took_s,
                    "s",
                    side.took_s,
                )
                for name, side in rivals.items()
            ),
        ],
        (
            Bars("computed", "tokens", tuple((s.name, side.computed) for s, side in sides.items())),
            Bars(
                "first token, p50",
                "ms",
                tuple((s.name, ms(side.first_s, 0.5)) for s, side in sides.items()),
            ),
        ),
    )


def distinct(talks: Sequence[Conversation]) -> int:
    """Returns how many prompt tokens are computed where each block is computed once, and the last
    token of each prompt again, for its logits."""
    seen: set[int] = set()
    computed = 0
    for turn in (turn for talk in talks for turn in talk):
        known = beginning = 0
        for end in range(BLOCK_SIZE, len(turn.prompt) + 1, BLOCK_SIZE):
            beginning = hash((beginning, *turn.prompt[end - BLOCK_SIZE : end]))
            if beginning in seen:
                known = end
            seen.add(beginning)
        computed += len(turn.prompt) - min(known, len(turn.prompt) - 1)
    return computed


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
    sharing: Sharing,
    kv: Path,
) -> Side:
    """kv: an empty folder for tiers."""
    tiers: tuple[str, ...] = ()
    if sharing.tiers:
        sizes = ("--prefix-host-mib", str(args.host_mib), "--prefix-disk-mib", str(args.disk_mib))
        tiers = (*sizes, "--prefix-store", str(kv / "store"))

    def with_own_disk(layout: Layout) -> Layout:
        folders = {
            spec.name: ("--prefix-disk-folder", str(kv / spec.name))
            for spec in layout.processes
            if spec.role == "decode" and sharing.tiers
        }
        return replace(
            layout,
            processes=tuple(
                replace(spec, command=(*spec.command, *folders.get(spec.name, ())))
                for spec in layout.processes
            ),
        )

    options = UpOptions(
        model=str(model),
        prefill=0,
        decode=args.workers,
        threads=1,
        transport=args.transport,
        kv_memory_mib=args.kv_mib,
        engine_flags=("--max-running", str(args.running), *tiers),
        router_flags=(
            *("--collect-prefix-tokens", "-1" if sharing.any_worker else "0"),
            # All are answered, however slow the machine is.
            *("--max-queue-s", "300"),
        ),
    )
    async with fleet(options, change=with_own_disk) as running:
        await _drive(running, talks[:1] * args.workers, args, shared=False, name="warm")
        before, spent = await _totals(running), sum(running.spent_s().values())
        began = time.perf_counter()
        samples = await _drive(running, talks, args, shared=sharing.own, name="turn")
        took_s = time.perf_counter() - began
        cpu_s = sum(running.spent_s().values()) - spent
        after = await _totals(running)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def total(name: str) -> float:
        return sum(value for key, value in gained.items() if key.partition("{")[0] == name)

    def by_label(name: str) -> dict[str, float]:
        return {key.split('"')[1]: value for key, value in gained.items() if key.startswith(name)}

    return Side(
        samples,
        total("baton_prefill_tokens_total"),
        total("baton_cached_tokens_total"),
        total("baton_prefix_collected_tokens_total"),
        {
            tier: by_label("baton_prefix_restored_tokens_total").get(tier, 0.0)
            for tier in (TIERS if sharing.tiers else ())
        },
        cpu_s,
        took_s,
        by_label("baton_prefix_collects_total"),
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
