"""Attempts for scheduler tests: small inputs that share prefixes, and what must come of them.

The runner fails on an input that ends with EOS; no sequence goes on behind a sampled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from batonlm.core.kvcache.block_pool import BlockPool, Extents
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.events import Event, FirstTokens, KvComplete, NewTokens, Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner, StepPlan, StepResult
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.testing.fake_runner import FakeRunner

VOCAB_SIZE = 512
MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
EOS = 3


def attempt(
    request_id: str = "r",
    *,
    size: int = 10,
    seed: int = 0,
    n: int = 1,
    max_tokens: int = 8,
    salt: bytes = b"",
    priority: int = 0,
    remaining_s: float | None = None,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    sampling: SamplingParams | None = None,
    accepted: tuple[int, ...] = (),
) -> Attempt:
    """Inputs of the same seed are prefixes of one another."""
    prompt = tuple(4 + (seed * 31 + i * 7) % (VOCAB_SIZE - 4) for i in range(size))
    return Attempt(
        request_id,
        0,
        tuple(range(n)),
        prompt + accepted,
        size,
        sampling or SamplingParams(seed=seed),
        StopParams(max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos),
        priority=priority,
        remaining_s=remaining_s,
        cache_salt=salt,
    )


def runner(
    num_blocks: int,
    *,
    delay_steps: int = 0,
    eos_every: int = 0,
    num_swap_blocks: tuple[int, int] = (0, 0),
    lost_swap_blocks: Iterable[int] = (),
    depth: int = 1,
    state_positions: int = 0,
) -> FakeRunner:
    return FakeRunner(
        num_blocks,
        BLOCK_SIZE,
        VOCAB_SIZE,
        MAX_MODEL_LEN,
        (EOS,),
        eos_every=eos_every,
        delay_steps=delay_steps,
        poison_token_id=EOS,
        num_swap_blocks=num_swap_blocks,
        lost_swap_blocks=lost_swap_blocks,
        depth=depth,
        state_positions=state_positions,
    )


def pool_of(engine: ModelRunner) -> BlockPool:
    return BlockPool(
        engine.num_blocks,
        engine.block_size,
        state_positions=engine.layout.state_positions,
        snapshot_positions=engine.block_size,
    )


def prefill_loop(
    num_blocks: int = 64,
    policy: SchedulerPolicy | None = None,
    *,
    eos_every: int = 0,
    state_positions: int = 0,
) -> EngineLoop:
    engine = runner(num_blocks, eos_every=eos_every, state_positions=state_positions)
    return EngineLoop(engine, Scheduler(pool_of(engine), policy or PREFILL, engine.model))


def decode_loop(
    num_blocks: int = 64,
    policy: SchedulerPolicy | None = None,
    *,
    eos_every: int = 0,
    num_swap_blocks: tuple[int, int] = (0, 0),
    lost_swap_blocks: Iterable[int] = (),
    depth: int = 1,
    delay_steps: int | None = None,
    state_positions: int = 0,
) -> EngineLoop:
    """depth: how many steps are in flight; with more than one they are planned ahead. delay_steps:
    of the runner, by default as late as that allows."""
    engine = runner(
        num_blocks,
        eos_every=eos_every,
        num_swap_blocks=num_swap_blocks,
        lost_swap_blocks=lost_swap_blocks,
        depth=depth,
        delay_steps=depth - 1 if delay_steps is None else delay_steps,
        state_positions=state_positions,
    )
    scheduler = Scheduler(
        pool_of(engine),
        policy or SchedulerPolicy(headroom=8),
        engine.model,
        num_swap_blocks=num_swap_blocks,
    )
    return EngineLoop(engine, scheduler)


def run(loop: EngineLoop, plan: StepPlan) -> StepResult:
    """Computes one step to its end, with no other in flight."""
    loop.submit(plan)
    return loop.collect()[1]


def run_out(loop: EngineLoop, now: float = 0.0, *, most: int = 2000) -> list[Event]:
    """Steps until nothing is left, checking the books after each one. Time flies."""
    events: list[Event] = []
    for _ in range(most):
        events += loop.step(now)
        loop.idle_check()
        if not loop.scheduler.has_work:
            return events
        now += 0.1
    raise AssertionError(f"still at work after {most} steps")


class Outputs:
    """Collects NewTokens events and insists that no position is repeated or skipped."""

    def __init__(self) -> None:
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.ended: set[SequenceKey] = set()

    def take(self, events: list[Event]) -> Outputs:
        for event in events:
            if not isinstance(event, NewTokens):
                continue
            for made in event.tokens:
                so_far = self.tokens.setdefault(made.key, [])
                assert made.key not in self.ended, "tokens after the end"
                assert made.position == len(so_far), "a position was repeated or skipped"
                so_far += made.token_ids
                if made.finish_reason is not None:
                    self.ended.add(made.key)
        return self

    def of(self, one: Attempt) -> dict[int, list[int]]:
        """What each choice of an attempt said, without those that said nothing."""
        keys = one.keys()
        return {key.choice: self.tokens[key] for key in keys if key in self.tokens}


@cache
def expected(one: Attempt, eos_every: int = 0, state_positions: int = 0) -> dict[int, list[int]]:
    """What each choice of an attempt must say: run alone, in a large pool, undisturbed."""
    loop = decode_loop(256, SchedulerPolicy(), eos_every=eos_every, state_positions=state_positions)
    loop.scheduler.add(one, 0.0)
    return Outputs().take(run_out(loop)).of(one)


Kv = tuple[bytes, bytes]
"""KV of positions, and the state behind them, which may be empty."""


def _ranges(engine: ModelRunner, first: int, end: int) -> Iterator[tuple[int, int]]:
    """(place in the table, count) of positions from the first on, and of the state."""
    layout = engine.layout
    for start, count in ((first, end - first), (end, layout.state_positions)):
        yield layout.place(start, end, engine.block_size), count


def packed(engine: ModelRunner, extents: Extents, first: int, end: int) -> Kv:
    """What a hand-over brings of a sequence that has `end` positions, from the first needed on."""
    parts = []
    for place, count in _ranges(engine, first, end):
        part = bytearray(count * engine.layout.bytes_per_position)
        if part:
            engine.pack(extents, place, count, memoryview(part))
        parts.append(bytes(part))
    return parts[0], parts[1]


def unpacked(engine: ModelRunner, extents: Extents, first: int, end: int, kv: Kv) -> None:
    """The inverse of `packed`."""
    for (place, count), part in zip(_ranges(engine, first, end), kv, strict=True):
        if part:
            engine.unpack(extents, place, count, memoryview(part))


@cache
def handed_over(
    one: Attempt, eos_every: int = 0, state_positions: int = 0
) -> tuple[FirstTokens, Kv]:
    """What a prefill worker gives for an attempt: token 0 and the KV of every position."""
    loop = prefill_loop(256, eos_every=eos_every, state_positions=state_positions)
    loop.scheduler.add(one, 0.0, keep=True)
    events = loop.step(1.0)
    (planned,) = [e for e in events if isinstance(e, Planned)]
    (first,) = [e for e in events if isinstance(e, FirstTokens)]
    return first, packed(loop.runner, planned.extents, 0, len(one.token_ids))


def fill_in(loop: EngineLoop, one: Attempt, from_position: int, kv: Kv) -> None:
    """Puts a given KV into the blocks of a reserved attempt, from a position on."""
    count, state_positions = len(one.token_ids), loop.runner.layout.state_positions
    num_blocks = -(-count // BLOCK_SIZE) - (-state_positions // BLOCK_SIZE)
    whole = runner(num_blocks, state_positions=state_positions)
    extents = ((0, num_blocks),)
    unpacked(whole, extents, 0, count, kv)
    wanted = packed(whole, extents, from_position, count)
    unpacked(loop.runner, loop.scheduler.extents(one.key), from_position, count, wanted)


def started(events: list[Event]) -> list[KvComplete]:
    return [event for event in events if isinstance(event, KvComplete)]
