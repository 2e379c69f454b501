"""`baton bench routing`: one routing decision among many workers, and the prefix index's memory.

No process is started: pools, prefix index and policy are the router's, the workers are made up.
Each holds prefixes of shared documents, as many as the index keeps. A request is a whole document,
whose hashes are given because they come with its token ids. Between two decisions some workers
report, and every decision is placed, so that snapshots are renewed as often as in a router.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from typing import Any

from baton_loadtest.bench.options import option
from baton_loadtest.report import Report, Result, at_most, ms
from batonlm.core.kvcache.cache_events import BATCH_UNITS, CacheBatch
from batonlm.core.kvcache.prefix import HASH_BYTES, UNIT_TOKENS
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.failures import Breaker
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed, WorkerState
from batonlm.core.routing.prefix_index import BYTES_PER_ENTRY, MAX_ENTRIES, PrefixIndex
from batonlm.core.routing.routing import Demand, RoutingPolicy, decide
from batonlm.router.workers.discovery import Discovery
from batonlm.router.workers.fleet import FleetContext, Pool, Worker, WorkerLink
from batonlm.rpc.channels import Channels

PLOTS = False
OPTIONS = (
    option("--workers", 1000, "half prefill, half decode"),
    option("--tokens", 100_000, "of a prompt"),
    option("--decisions", 2000),
)

DOCUMENTS = 64
COMMON_UNITS = 8
"""The common prefix of all documents, as of a system prompt."""

REPORTS = 20
"""Workers that report their load between two decisions."""

BLOCK = 64
GOAL_MS = 1.0
MODEL = ModelDescription("made-up", "model", 1 << 20, 32000, (), "tokenizer")
LAYOUT = KvLayout("model", "bfloat16", 32, 8, 128, 128)


def measure(args: argparse.Namespace) -> Report:
    """Times decisions. Every step of a decision is also timed alone in the same run."""
    draw = random.Random(args.seed)
    documents = _documents(draw, args.tokens)
    tracemalloc.start()
    pools = [_StandingPool(role, args.workers // 2, draw) for role in ("prefill", "decode")]
    before = tracemalloc.get_traced_memory()[0]
    for pool in pools:
        pool.fill(documents, draw)
    index_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    entries = sum(len(pool.known) for pool in pools)
    # As in a router that has run for a while.
    gc.collect()
    gc.freeze()
    whole, looking = _decisions(args.decisions, args.tokens, documents, pools, draw)
    bound = 2 * MAX_ENTRIES * BYTES_PER_ENTRY
    return Report(
        [
            Result("workers, half of them prefill", args.workers, ""),
            Result("units of a prompt, hashes given", len(documents[0]) // HASH_BYTES, ""),
            Result("routing decision, p50", ms(whole, 0.5), "ms"),
            at_most("routing decision, p99", ms(whole, 0.99), "ms", GOAL_MS),
            Result("of it the index's look-up, p99", ms(looking, 0.99), "ms"),
            Result("entries of both indices", entries, ""),
            at_most("memory of both indices", index_bytes / 1e6, "MB", bound / 1e6),
            at_most("memory of an entry", index_bytes / entries, "bytes", BYTES_PER_ENTRY),
        ]
    )


def _decisions(
    count: int,
    tokens: int,
    documents: list[bytes],
    pools: list[_StandingPool],
    draw: random.Random,
) -> tuple[list[float], list[float]]:
    """Returns the seconds of each decision, and of its look-ups alone."""
    prefills, decodes = pools
    policy = RoutingPolicy()
    whole, looking = [], []
    clock = time.perf_counter
    for number in range(count):
        for pool in pools:
            for worker in draw.sample(pool.standing, min(REPORTS, len(pool.standing))):
                worker.report(_load(draw))
        hashes = draw.choice(documents)
        demand = Demand(
            str(number), tokens, 1, True, "made-up", "model", "tokenizer", prefix_hashes=hashes
        )
        began = clock()
        decision = decide(demand, prefills.view(hashes), decodes.view(hashes), policy, 0.0)
        for identity, pool in ((decision.prefill, prefills), (decision.decode, decodes)):
            placed = pool.get(identity.instance_id) if identity is not None else None
            if placed is not None:
                placed.place(1, decision.uncached_tokens, tokens)
        whole.append(clock() - began)
        began = clock()
        prefills.known.find(hashes)
        decodes.known.find(hashes)
        looking.append(clock() - began)
    return whole, looking


class _StandingPool(Pool[Any]):
    """A pool of made-up workers without tasks that follow them."""

    def __init__(self, role: str, workers: int, draw: random.Random) -> None:
        self.known = PrefixIndex()
        me = WorkerIdentity("router", "r" * 32, "")
        context = FleetContext(Discovery({}), Channels(), me, time.monotonic)
        super().__init__(role, context, lambda *_: _Client(), self.known)
        self.standing = [self._worker(role, number, draw) for number in range(workers)]
        no_link: Any = None
        for worker in self.standing:
            link = self.links[worker.identity.address] = WorkerLink(self, no_link)
            link.worker, link.settled = worker, True

    def _worker(self, role: str, number: int, draw: random.Random) -> Worker[Any]:
        identity = WorkerIdentity(role, f"{number:032x}", f"host-{number}:1")
        description = WorkerDescription(
            identity,
            MODEL,
            LAYOUT,
            ("nixl",),
            num_blocks=20_000,
            block_size=BLOCK,
            kv_bytes_per_position=LAYOUT.bytes_per_position,
        )
        nothing: Any = None
        worker = Worker(
            description, _Client(), running=nothing, breaker=Breaker(), number=self.known.join()
        )
        worker.report(_load(draw))
        return worker

    def fill(self, documents: list[bytes], draw: random.Random) -> None:
        """Gives every worker prefixes of documents, until the index keeps no more of it."""
        for worker in self.standing:
            added: dict[bytes, None] = {}
            while len(added) < max(1024, 2 * MAX_ENTRIES // len(self.standing)):
                document = draw.choice(documents)
                units = draw.randint(1, len(document) // HASH_BYTES)
                # A part that no other worker has, such as the rest of a conversation.
                own = draw.randbytes(HASH_BYTES * draw.randint(1, 64))
                for unit in _split(document[: HASH_BYTES * units] + own):
                    added[unit] = None
            hashes = list(added)
            for start in range(0, len(hashes), BATCH_UNITS):
                part = b"".join(hashes[start : start + BATCH_UNITS])
                self.known.apply(worker.number, CacheBatch(0, part, snapshot=True))


class _Client:
    """The client of a worker that is never called."""

    ready = True

    async def run(self) -> None:
        """Does nothing."""


def _documents(draw: random.Random, tokens: int) -> list[bytes]:
    """Returns hashes of documents with a common prefix."""
    common, units = draw.randbytes(HASH_BYTES * COMMON_UNITS), -(-tokens // UNIT_TOKENS)
    own = max(0, units - COMMON_UNITS)
    return [common + draw.randbytes(HASH_BYTES * own) for _ in range(DOCUMENTS)]


def _load(draw: random.Random) -> WorkerLoad:
    pace = draw.uniform(0.8, 1.25)
    return WorkerLoad(
        WorkerState.SERVING,
        waiting_sequences=draw.randrange(4),
        waiting_tokens=draw.randrange(40_000),
        running_sequences=draw.randrange(64),
        free_blocks=draw.randrange(4_000, 20_000),
        speed=WorkerSpeed(
            0.01 * pace, 5e-5 * pace, 2e-9 * pace, 0.005, 5e-5 * pace, 1e-9, 2048, 5e9, 0.01
        ),
    )


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
