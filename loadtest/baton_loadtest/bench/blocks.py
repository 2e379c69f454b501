"""How much of the blocks' memory goes unused, and how much sharing saves; computes no KV.

Everything is read from the StepPlans that a scheduler makes, whose chunks name their blocks.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidArgument
from baton.core.kvcache.block_pool import BlockPool
from baton.core.request.attempt import Attempt
from baton.core.request.model import ModelDescription
from baton.core.scheduler.events import KvComplete
from baton.core.scheduler.policy import SchedulerPolicy
from baton.core.scheduler.scheduler import Scheduler
from baton_loadtest.bench.replay import replay
from baton_loadtest.bench.serving import BLOCK_SIZE, EVERYTHING, attempt

POOL_BLOCKS = 65536
AT_ONCE = 64
LONGEST = 8192
VOCAB = 32000

Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens) of each request."""


@dataclass(slots=True)
class Waste:
    """Positions, summed over all steps and the sequences that decode in them.

    unused: those of a last block that is partly filled. ahead: whole blocks that were taken so that
    the sequence can grow. slabs: what the same sequences would own if each had room for the longest
    request of all.
    """

    owned: int = 0
    unused: int = 0
    ahead: int = 0
    slabs: int = 0

    @property
    def used(self) -> int:
        return self.owned - self.unused - self.ahead


@dataclass(slots=True)
class Sharing:
    """Blocks of all sequences' tables, and how many different ones these are, summed over steps;
    input tokens, and those of them whose KV was there."""

    named: int = 0
    different: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0


def chat_lengths(seed: int, requests: int) -> Lengths:
    """Log-normal lengths, as in public traces of chat: median 900 in, 150 out, long tails."""
    draw = random.Random(seed)

    def length(median: int, spread: float, most: int) -> int:
        return min(most, max(8, round(median * draw.lognormvariate(0.0, spread))))

    return [(length(900, 0.9, 4096), length(150, 0.8, 1024)) for _ in range(requests)]


def short_lengths(seed: int, requests: int) -> Lengths:
    """Uniform: 32 to 512 in, 16 to 256 out, as `baton bench engine` asks."""
    draw = random.Random(seed)
    return [(draw.randint(32, 512), draw.randint(16, 256)) for _ in range(requests)]


def read_lengths(path: Path, requests: int) -> Lengths:
    """The first requests of a CSV file. Raises InvalidArgument."""
    try:
        with path.open(newline="") as opened:
            rows = csv.DictReader(opened)
            found = [
                (int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
                for row, _ in zip(rows, range(requests), strict=False)
            ]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InvalidArgument(f"cannot be read: {error}", field="lengths") from None
    return [pair for pair in found if sum(pair) <= LONGEST]


def waste(lengths: Lengths, seed: int) -> Waste:
    """Over a replay in which no prompt shares a prefix."""
    draw = random.Random(seed)
    slab = max(map(sum, lengths))
    found = Waste()
    decoding: set[int] = set()
    attempts = (
        attempt(str(index), _drawn(draw, prompt), output)
        for index, (prompt, output) in enumerate(lengths)
    )
    for plan, _ in replay(scheduler(), attempts, AT_ONCE):
        for chunk in plan.chunks:
            if chunk.sequence_id in decoding:
                owned = BLOCK_SIZE * sum(count for _, count in chunk.extents)
                filled = -(-chunk.end_position // BLOCK_SIZE) * BLOCK_SIZE
                found.owned += owned
                found.ahead += owned - filled
                found.unused += filled - chunk.end_position
                found.slabs += slab
            decoding.update(row.sequence_id for row in chunk.samples)
    return found


def users_of_system_prompts(seed: int) -> list[Attempt]:
    """256 users of 8 system prompts of 512 tokens each, with a question of their own."""
    draw = random.Random(seed)
    systems = [_drawn(draw, 512) for _ in range(8)]
    return [
        attempt(
            str(user),
            [*systems[draw.randrange(8)], *_drawn(draw, draw.randint(32, 256))],
            draw.randint(64, 128),
        )
        for user in range(256)
    ]


def four_choices(seed: int) -> list[Attempt]:
    """64 requests for 4 choices each."""
    draw = random.Random(seed)
    return [
        attempt(str(i), _drawn(draw, draw.randint(128, 512)), draw.randint(64, 128), (0, 1, 2, 3))
        for i in range(64)
    ]


def sharing(attempts: Iterable[Attempt]) -> Sharing:
    """Over a replay."""
    asked = list(attempts)
    found = Sharing(input_tokens=sum(len(one.token_ids) for one in asked))
    for plan, events in replay(scheduler(), asked, AT_ONCE):
        tables = [_blocks(chunk.extents) for chunk in plan.chunks]
        found.named += sum(map(len, tables))
        found.different += len(set().union(*tables))
        found.cached_tokens += sum(e.cached_tokens for e in events if isinstance(e, KvComplete))
    return found


def scheduler(max_sequences: int = AT_ONCE) -> Scheduler:
    """A decode worker's, with more blocks than it needs."""
    rules = SchedulerPolicy(max_sequences=max_sequences, limit=EVERYTHING)
    model = ModelDescription(
        name="none", digest="", max_model_len=LONGEST, vocab_size=VOCAB, eos_token_ids=()
    )
    return Scheduler(BlockPool(POOL_BLOCKS, BLOCK_SIZE), rules, model)


def _blocks(extents: Sequence[tuple[int, int]]) -> set[int]:
    return {block for first, count in extents for block in range(first, first + count)}


def _drawn(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]
