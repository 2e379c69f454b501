"""Exact mode: a row's logits are the same bits, whatever is around it, however computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine import exact
from batonlm.engine.config import EngineConfig
from batonlm.engine.linear import PackedLinear
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import GREEDY, fill, packed, random_prompts
from tests.engine.tiny_models import ARCHS, VOCAB, save_tiny_model

LENGTH = 90
BLOCKS = 6
OURS: Extents = ((0, BLOCKS),)
APART: Extents = tuple((block, 1) for block in (11, 9, 7, 13, 6, 8))
SOME = ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"]
TEXT = random_prompts([1060], VOCAB)[0]


def load(folder: Path) -> TorchRunner:
    runner = TorchRunner.load(EngineConfig(str(folder), num_blocks=500))
    assert runner.exact, runner.not_exact_because
    return runner


def logits(
    runner: TorchRunner,
    cuts: Sequence[int],
    table: Extents = OURS,
    *,
    start: int = 0,
    neighbours: int = 0,
    first: bool = True,
) -> dict[int, torch.Tensor]:
    """Logits of TEXT at the last position of every chunk, chunks ending at `cuts`.

    neighbours: how many other sequences, each at a position of its own, run a token in every step,
    after ours or before it.
    """
    found = {}
    others = random_prompts([1] * neighbours, VOCAB, seed=9)
    for end in cuts:
        row = SampleRow(0, 0, 0, GREEDY)
        ours = Chunk(0, TEXT[start:end], start, table, (row,))
        around = [
            Chunk(1 + i, text, i % 37, ((20 + 3 * i, 3),), (row,)) for i, text in enumerate(others)
        ]
        chunks = [ours, *around] if first else [*around, ours]
        rows = runner.forward(StepPlan(0, tuple(chunks)))
        found[end] = rows[0 if first else -1].clone()
        start = end
    return found


def assert_bits(got: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> None:
    for position, row in got.items():
        assert torch.equal(row, wanted[position]), f"logits at position {position} differ"


def drafted(runner: TorchRunner, count: int, table: Extents) -> dict[int, torch.Tensor]:
    """Logits at every position, of chunks of a token and so many drafts. First all of these are
    wrong, so that the right ones overwrite them."""
    found: dict[int, torch.Tensor] = {}
    rows = tuple(SampleRow(0, 0, i, GREEDY) for i in range(count + 1))
    for start in range(0, LENGTH - count, count + 1):
        for wrong in (True, False):
            drafts = TEXT[start + 1 : start + 1 + count]
            inputs = (TEXT[start], *(reversed(drafts) if wrong else drafts))
            chunk = Chunk(0, inputs, start, table, rows, num_drafts=count)
            made = runner.forward(StepPlan(0, (chunk,)))
            found |= {start + 1 + i: row.clone() for i, row in enumerate(made)}
    return found


def check(runner: TorchRunner) -> None:
    wanted = logits(runner, range(1, LENGTH + 1))
    for count in (1, 3, 8):
        assert_bits(drafted(runner, count, OURS), wanted)
        assert_bits(drafted(runner, count, APART), wanted)
    for size in (2, 5, 7, 16, 23, 64, LENGTH):
        cuts = [*range(size, LENGTH, size), LENGTH]
        assert_bits(logits(runner, cuts), wanted)
        assert_bits(logits(runner, cuts, APART), wanted)
    for count in (1, 2, 7, 15, 32, 63):
        assert_bits(logits(runner, [50, 51, 52, LENGTH], neighbours=count), wanted)
        assert_bits(logits(runner, [33, 34, LENGTH], APART, neighbours=count, first=False), wanted)
    # A prefix that came over the wire, and one computed again after the sequence was lost.
    fill(runner, TEXT[:40], OURS)
    runner.unpack(APART, 0, 40, memoryview(packed(runner, OURS, 0, 40)))
    assert_bits(logits(runner, [41, 42, LENGTH], APART, start=40), wanted)
    assert_bits(logits(runner, [77, 78, 79]), wanted)


@pytest.mark.parametrize("arch", SOME)
def test_logits_are_bit_equal(arch: str, saved: Callable[[str], Path]) -> None:
    check(load(saved(arch)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(set(ARCHS) - set(SOME)))
def test_logits_of_every_architecture_are_bit_equal(
    arch: str, saved: Callable[[str], Path]
) -> None:
    check(load(saved(arch)))


@pytest.mark.deep
@pytest.mark.parametrize("window", [0, 30, 600])
def test_long_contexts_are_bit_equal(window: int, tmp_path: Path) -> None:
    """Around the 512 keys that torch's CPU kernel takes at once, and its multiples."""
    folder = save_tiny_model("mistral", tmp_path / "long", sliding_window=window or None)
    runner = load(folder)
    near = [*range(506, 531), *range(1015, 1061)]
    wanted = logits(runner, near, ((100, 67),))
    scattered = tuple((block, 1) for block in range(300, 233, -1))
    for cuts in ([512, 1024, 1060], [528, 1017, 1059], [511, 513, 527, 1023, 1060]):
        for table in (((20, 67),), scattered):
            assert_bits(logits(runner, cuts, table), wanted)


def test_batches_of_1_to_64_are_bit_equal(saved: Callable[[str], Path]) -> None:
    """Every size of a decode batch, first and last in it, extents in one piece and in many."""
    runner = load(saved("llama"))
    wanted = logits(runner, [49, 50])
    fill(runner, TEXT[:49], OURS)
    fill(runner, TEXT[:49], APART)
    for count in range(64):
        table, first = (OURS, APART)[count % 2], count % 3 == 0
        got = logits(runner, [50], table, start=49, neighbours=count, first=first)
        assert_bits(got, wanted)


def test_long_contexts_in_torn_extents_decode_with_the_same_bits(
    saved: Callable[[str], Path],
) -> None:
    """A shared prefix and an own end, pieces of all sizes, and many: gathered, not merged."""
    runner = load(saved("llama"))
    ends = [700, 701, 1024, 1025, 1059]
    wanted = logits(runner, ends, ((20, 67),))
    prefix: Extents = ((150, 40), (230, 27))
    pieces: Extents = ((300, 1), (310, 30), (305, 5), (350, 2), (353, 29))
    for table in (prefix, pieces, tuple((block, 1) for block in range(499, 432, -1))):
        fill(runner, TEXT[:699], table)
        assert_bits(logits(runner, ends, table, start=699, neighbours=5), wanted)
        assert_bits(logits(runner, [1059], table, start=1058, first=False), wanted)


@pytest.mark.deep
def test_the_plain_kernel_is_exact_too(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("llama")), num_blocks=500, attention="reference")
    runner = TorchRunner.load(config)
    assert runner.exact
    check(runner)


@pytest.mark.deep
@pytest.mark.parametrize("threads", [2, 3])
def test_sizes_that_fit_no_vector_and_uneven_threads(threads: int, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "odd", intermediate_size=1003, hidden_size=72)
    torch.set_num_threads(threads)
    runner = load(folder)
    wanted = logits(runner, range(60, LENGTH + 1))
    for cuts in ([LENGTH], [60, 61, LENGTH], range(65, LENGTH + 1, 5)):
        assert_bits(logits(runner, cuts), wanted)
        assert_bits(logits(runner, cuts, APART, neighbours=33), wanted)


def test_a_step_is_padded_once_and_not_by_every_layer(saved: Callable[[str], Path]) -> None:
    runner = load(saved("llama"))
    seen: list[tuple[int, PackedLinear]] = []
    for module in runner._network.modules():
        if isinstance(module, PackedLinear) and module.out_features != VOCAB:
            module.register_forward_pre_hook(
                lambda layer, given: seen.append((given[0].shape[-2], layer))
            )
    logits(runner, [49, 50], neighbours=8)
    assert seen
    for rows, layer in seen:
        assert layer.sizes is not None and sum(exact.cuts(rows, layer.sizes)) == rows


def test_without_exact_mode_bits_are_not_promised(saved: Callable[[str], Path]) -> None:
    runner = TorchRunner.load(EngineConfig(str(saved("llama")), num_blocks=64, exact=False))
    assert not runner.exact
    assert "off" in runner.not_exact_because
