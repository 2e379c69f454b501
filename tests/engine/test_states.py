"""Models whose layers keep a state of the sequence give the tokens that transformers generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.attempt import SequenceKey
from batonlm.core.scheduler.plan import BlockSwap, Chunk, StepPlan
from batonlm.engine import selfcheck
from batonlm.engine.attention import own
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.memory import plan_memory
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together
from tests.engine.modes import asked, attempt, decode_loop, run
from tests.engine.test_parity import expected
from tests.engine.tiny_models import STATES, VOCAB

LENGTHS = (1, 5, 16, 17, 33, 50, 150)
NEW_TOKENS = 6
PREFIX = 20
POOL = 1024
SWAP = 16 << 20
FAST = {"lfm2", "jamba"}
"""With convolutions alone; and with a recurrent state that no longer chunk takes up."""
ALL = [arch if arch in FAST else pytest.param(arch, marks=pytest.mark.deep) for arch in STATES]


def load(folder: Path, **options: int) -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(folder), num_blocks=POOL, **options))  # type: ignore[arg-type]


Open = Callable[..., TorchRunner]


@pytest.fixture(scope="module")
def opened(saved: Callable[[str], Path]) -> Iterator[Open]:
    """(architecture, bytes of swap memory) -> its runner, which tests share: none needs its blocks
    empty, and what others left there must not matter."""
    runners: dict[tuple[str, int], TorchRunner] = {}

    def runner(arch: str, swap: int = 0) -> TorchRunner:
        key = arch, swap
        if key not in runners:
            runners[key] = load(saved(arch), swap_host_bytes=swap)
        return runners[key]

    yield runner
    for each in runners.values():
        each.close()


def front_of(runner: TorchRunner) -> int:
    """Blocks of a table that hold the state."""
    return runner.layout.state_blocks(runner.block_size)


def blocks_of(extents: Extents) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


@pytest.mark.parametrize("arch", ALL)
def test_tokens_equal_transformers(arch: str, opened: Open) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected(arch, prompts, NEW_TOKENS)
    runner, other = opened(arch), opened(arch, SWAP)
    # Nothing is right there before it is handed over.
    memory = other.memory
    nothing = torch.zeros(memory.num_blocks, memory.block_bytes, dtype=torch.uint8)
    with torch.inference_mode():
        memory.blocks_in(0, memory.num_blocks, nothing)
    front = front_of(runner)
    blocks = front + -(-(max(LENGTHS) + NEW_TOKENS) // runner.block_size)
    one, apart = together(len(prompts), blocks), scattered(len(prompts), blocks)
    assert generate(runner, prompts, one, NEW_TOKENS) == wanted
    assert generate(runner, prompts, apart, NEW_TOKENS, chunk=7) == wanted
    # Longer than the pieces in which transformers computes a chunk.
    assert generate(runner, prompts, one, NEW_TOKENS, chunk=80) == wanted
    for prompt, here, there in zip(prompts, one, apart, strict=True):
        if count := min(PREFIX, len(prompt) - 1):
            fill(runner, prompt[:count], here)
            rows = front * runner.block_size + count
            other.unpack(there, 0, rows, memoryview(packed(runner, here, 0, rows)))
    assert generate(other, prompts, apart, NEW_TOKENS, start=PREFIX) == wanted


@pytest.mark.parametrize("arch", ALL)
def test_states_are_swapped_and_forked(arch: str, opened: Open) -> None:
    """One sequence is swapped out, its blocks are used by another, and it comes back elsewhere; a
    copy of it is as good."""
    prompts = random_prompts((30, 40), VOCAB)
    wanted = expected(arch, prompts, NEW_TOKENS)
    runner = opened(arch, SWAP)
    count = front_of(runner) + 3
    first, second, third = together(3, count)
    fill(runner, prompts[0][:21], first)
    stored = tuple(range(count))
    runner.submit(StepPlan(0, (), swap_out=(BlockSwap(tuple(blocks_of(first)), stored),)))
    runner.collect()
    assert generate(runner, prompts[1:], [first], NEW_TOKENS) == wanted[1:]
    runner.submit(StepPlan(0, (), swap_in=(BlockSwap(tuple(blocks_of(second)), stored),)))
    runner.collect()
    copies = tuple(
        BlockCopy(source, target, runner.block_size)
        for source, target in zip(blocks_of(second), blocks_of(third), strict=True)
    )
    runner.submit(StepPlan(0, (), copies=copies))
    runner.collect()
    for table in (second, third):
        assert generate(runner, prompts[:1], [table], NEW_TOKENS, start=21) == wanted[:1]


KEPT_AHEAD = [
    (arch, 2) if arch in FAST else pytest.param(arch, 2, marks=pytest.mark.deep)
    for arch in ("lfm2", "jamba", "qwen3_next", "mamba2", "falcon_h1", "minimax", "rwkv")
]
"""Each kind of state, with steps planned ahead."""
LATER = 64
"""Tokens behind which a sequence has grown by blocks that a tight pool lacks."""
SOON = 16
"""Tokens in which a wrong state shows."""


@pytest.mark.parametrize(
    ("arch", "way", "depth"),
    [
        *(("lfm2", "recompute", 1), ("lfm2", "swap_host", 2)),
        *(("jamba", "recompute", 2), ("jamba", "swap_host", 1)),
        *(("qwen3_next", "recompute", 2), ("qwen3_next", "swap_host", 2)),
    ],
)
def test_preempted_sequences_go_on_with_the_same_tokens(
    arch: str, way: str, depth: int, opened: Open
) -> None:
    """There are blocks for the longest sequence and a half: what runs is preempted, and its state
    is made again from nothing in blocks that another one left, or brought back."""
    prompts = random_prompts((5, 33, 64, 90), VOCAB)
    wanted = expected(arch, prompts, LATER)
    runner = opened(arch, 0 if way == "recompute" else SWAP)
    whole = front_of(runner) - (-(max(map(len, prompts)) + LATER) // runner.block_size)
    loop = decode_loop(runner, 2 * whole - whole // 2, depth=depth)
    names = [f"r{i}" for i in range(len(prompts))]
    heard = run(loop, [attempt(*each, LATER) for each in zip(names, prompts, strict=True)])
    assert loop.scheduler.preemptions[way] > 0
    assert (asked(loop)["pending"] > 0) == (depth > 1)
    assert [heard.tokens[SequenceKey(name, 0, 0)] for name in names] == wanted


@pytest.mark.parametrize(("arch", "depth"), [("lfm2", 1), *KEPT_AHEAD])
def test_what_goes_on_from_a_kept_state_has_the_tokens_of_the_whole(
    arch: str, depth: int, opened: Open
) -> None:
    """The same prompt again, a second turn, and one that parts from both where no state is kept,
    before one that parts at the same place."""
    (prompt,), others = random_prompts((150,), VOCAB), random_prompts((21, 22, 23), VOCAB)
    (answer,) = expected(arch, [prompt], LATER)
    turns = [prompt + answer + others[0], *(prompt[:100] + other for other in others[1:])]
    wanted = [answer, answer, *expected(arch, turns, SOON)]
    runner = opened(arch)
    loop = decode_loop(runner, POOL, depth=depth)
    found = []
    for number, (turn, tokens) in enumerate(zip([prompt, prompt, *turns], wanted, strict=True)):
        heard = run(loop, [attempt(f"r{number}", turn, len(tokens))])
        assert heard.tokens[SequenceKey(f"r{number}", 0, 0)] == tokens
        found.append(heard.cached[f"r{number}"])
    if runner.stepwise:
        # What follows the first 64 positions takes longer alone than all of them in one piece.
        assert found == [0, 128, 192, 0, 0]
    else:
        assert found == [0, 128, 192, 0, 64]


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_memory_is_foreseen(arch: str, saved: Callable[[str], Path], opened: Open) -> None:
    foreseen = foresee(EngineConfig(str(saved(arch)), num_blocks=POOL))
    runner = opened(arch)
    assert foreseen.memory.block_bytes == runner.memory.block_bytes
    assert foreseen.memory.state_blocks == front_of(runner) > 0
    assert foreseen.shape.layout == replace(runner.layout, model_digest="")
    assert "state" in dict(foreseen.memory.lines())


def test_a_pool_counts_states() -> None:
    config = EngineConfig("m", max_batch=4, block_size=16, kv_memory_bytes=1 << 40)
    plan = plan_memory(
        config,
        device="cpu",
        model_len=160,
        free_bytes=1 << 40,
        weights=0,
        activations=0,
        position=64,
        state_positions=100,
    )
    assert plan.state_blocks == 7
    assert plan.num_blocks == 4 * (7 + 10)
    assert (plan.sequences, plan.max_model_len) == (4, 160)
    assert plan.sequence_bytes == 17 * 16 * 64


def test_positions_of_a_model_without_kv_cost_little(opened: Open) -> None:
    layout = opened("mamba").layout
    assert layout.state_positions * layout.bytes_per_position >= 3 * 128 * (16 + 4) * 4
    assert layout.bytes_per_position == 64


def test_two_chunks_that_share_a_state_are_refused(opened: Open) -> None:
    runner = opened("lfm2")
    front = front_of(runner)
    tables: list[Extents] = [((0, front), (at, 1)) for at in (front, front + 1)]
    chunks = tuple(Chunk(i, [5], 0, table) for i, table in enumerate(tables))
    with pytest.raises(Internal, match="same block"):
        runner.submit(StepPlan(0, chunks))
    with pytest.raises(Internal, match="cover"):
        runner.submit(StepPlan(0, (Chunk(0, [5], 0, ((0, front),)),)))


def test_states_are_not_converted(saved: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TorchRunner.load(EngineConfig(str(saved("lfm2")), kv_wire_dtype="bfloat16"))
    assert caught.value.field == "kv_wire_dtype"


def _no_steps(*_: object) -> bool:
    return False


def test_a_state_that_is_dropped_is_seen_at_load(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "_is_stepwise", _no_steps)
    with pytest.raises(UnsupportedModel, match="chunked prompts"):
        load(saved("jamba"))


def test_a_state_that_a_fork_lacks_is_seen_at_load(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = selfcheck.SelfCheck.states

    def without_states(
        check: selfcheck.SelfCheck, copy: Callable[[BlockCopy], None], size: int
    ) -> None:
        real(check, lambda each: copy(each) if each.source else None, size)

    monkeypatch.setattr(selfcheck.SelfCheck, "states", without_states)
    with pytest.raises(UnsupportedModel, match="forks"):
        load(saved("lfm2"))
