"""Two ranks in one process, over real gloo: tokens equal transformers', KV fits one rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from baton.core.errors import Internal, InvalidArgument
from baton.engine.config import EngineConfig
from baton.engine.ranks.runner import RankedRunner
from baton.engine.runner import TorchRunner
from baton.transfer.staging import HostMemory, StagingPool
from tests.engine import test_runner_contract as contract
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together
from tests.engine.local_ranks import LocalRanks
from tests.engine.modes import attempt, decode_loop, run
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB, save_tiny_model

LENGTHS = (1, 5, 16, 33, 65, 90)
NEW = 6
BLOCKS = -(-(max(LENGTHS) + NEW) // 16)

Open = Callable[..., RankedRunner]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens a runner of several ranks; the same one for the same model."""
    known: dict[tuple[Path, int, int], RankedRunner] = {}
    with ExitStack() as ends:

        def open_ranks(folder: Path, size: int = 2, number: int = 0) -> RankedRunner:
            key = folder, size, number
            if key not in known:
                config = EngineConfig(str(folder), num_blocks=64, threads=1)
                known[key] = RankedRunner.open(LocalRanks(size), config)
                ends.callback(known[key].close)
            return known[key]

        yield open_ranks


def one_rank(folder: Path) -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(folder), num_blocks=64))


@pytest.mark.deep
@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        "qwen3",
        *(
            pytest.param(arch, marks=pytest.mark.slow)
            for arch in ("llama_tied", "qwen2", "mistral", "gemma2", "gemma3", "smollm3", "granite")
        ),
    ],
)
def test_tokens_equal_transformers_and_kv_moves_between_degrees(
    arch: str, saved: Callable[[str], Path], ranked: Open
) -> None:
    two, one = ranked(saved(arch)), one_rank(saved(arch))
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected(arch, prompts, NEW)
    here, there = together(len(prompts), BLOCKS), scattered(len(prompts), BLOCKS)
    assert two.exact and two.layout == one.layout and two.num_blocks == one.num_blocks
    for chunk in (10_000, 64, 7):
        assert generate(two, prompts, there, NEW, chunk=chunk) == wanted
    for sender, taker in ((two, one), (one, two)):
        for prompt, source, target in zip(prompts, here, there, strict=True):
            count = min(40, len(prompt) - 1)
            if count:
                fill(sender, prompt[:count], source)
                taker.unpack(target, 0, count, memoryview(packed(sender, source, 0, count)))
        assert generate(taker, prompts, there, NEW, start=40) == wanted


def test_packed_kv_is_one_ranks_but_for_rounding(
    saved: Callable[[str], Path], ranked: Open
) -> None:
    two, one = ranked(saved("llama")), one_rank(saved("llama"))
    (prompt,), table = random_prompts((40,), VOCAB), ((2, 1), (9, 2))
    payloads = []
    for runner in (two, one):
        fill(runner, prompt, table)
        payloads.append(torch.frombuffer(packed(runner, table, 3, 37), dtype=torch.float32))
    torch.testing.assert_close(*payloads, rtol=1e-4, atol=1e-4)


def test_ranks_pack_where_a_payload_lies(saved: Callable[[str], Path], ranked: Open) -> None:
    """Into a buffer at once, and by way of a copy into other memory; the same bytes."""
    runner, ring = ranked(saved("llama")), StagingPool(3, 1 << 16)
    (prompt,), table, there = random_prompts((40,), VOCAB), ((0, 3),), ((7, 3),)
    fill(runner, prompt, table)
    wanted = packed(runner, table, 5, 30)
    memory = ring.memory
    assert isinstance(memory, HostMemory)
    runner.share(memory.fd, memory.address, memory.num_bytes)
    buffer = ring.view(1)[100 : 100 + len(wanted)]
    runner.pack(table, 5, 30, buffer)
    assert buffer == wanted
    assert not any(ring.view(0)) and not any(ring.view(2))
    assert not any(ring.view(1)[:100]) and not any(ring.view(1)[100 + len(wanted) :])
    assert packed(runner, table, 5, 30) == wanted
    runner.unpack(there, 5, 30, buffer)
    assert packed(runner, there, 5, 30) == wanted


def test_a_prefix_is_found_again(saved: Callable[[str], Path], ranked: Open) -> None:
    runner = ranked(saved("llama"))
    prompt = random_prompts((70,), VOCAB)[0]
    longer = prompt + random_prompts((9,), VOCAB, seed=2)[0]
    loop = decode_loop(runner, 64)
    heard = [run(loop, [attempt(name, text, NEW)]) for name, text in (("a", prompt), ("b", longer))]
    assert [next(iter(each.cached.values())) for each in heard] == [0, 64]
    texts = [next(iter(each.tokens.values())) for each in heard]
    assert texts == expected("llama", [prompt, longer], NEW)


@pytest.mark.deep
@pytest.mark.parametrize(
    "check",
    [
        contract.test_tokens_do_not_depend_on_blocks_or_chunks,
        contract.test_kv_moves_to_other_blocks_of_another_runner,
        contract.test_a_read_only_payload_can_be_unpacked,
        contract.test_other_kv_gives_other_tokens,
        contract.test_a_copied_block_continues_by_itself,
        contract.test_a_copy_comes_before_what_the_same_plan_computes,
        contract.test_results_come_in_the_order_submitted,
        contract.test_choices_of_one_prompt_are_drawn_apart,
        contract.test_seed_choice_and_position_key_the_draw,
        contract.test_banned_tokens_are_not_drawn,
        contract.test_logprobs_are_given_when_asked,
        contract.test_two_writers_of_a_block_and_bad_copies_are_refused,
        contract.test_payloads_of_a_wrong_size_are_refused,
    ],
)
def test_the_contract_holds(
    check: Callable[[Callable[[], RankedRunner]], None],
    saved: Callable[[str], Path],
    ranked: Open,
) -> None:
    numbers = iter((0, 1))
    check(lambda: ranked(saved("llama"), 2, next(numbers)))


def test_nothing_to_collect_is_an_error_and_close_is_idempotent(
    saved: Callable[[str], Path], ranked: Open
) -> None:
    runner = ranked(saved("llama"), 2, 1)
    with pytest.raises(Internal):
        runner.collect()
    runner.close()
    runner.close()


@pytest.mark.slow
def test_four_ranks_are_exact_and_right(tmp_path: Path, ranked: Open) -> None:
    """With more than two, the order of adding up matters."""
    folder = save_tiny_model("llama", tmp_path / "m", num_key_value_heads=4)
    runner, prompts = ranked(folder, 4), random_prompts(LENGTHS, VOCAB)
    assert runner.exact
    wanted = generate(one_rank(folder), prompts, together(len(prompts), BLOCKS), NEW)
    assert generate(runner, prompts, together(len(prompts), BLOCKS), NEW, chunk=7) == wanted


@pytest.mark.parametrize(
    "arch, size, told",
    [
        ("llama", 4, "num_key_value_heads 2"),
        ("llama", 3, "num_attention_heads 4"),
        ("phi3", 2, "qkv_proj"),
        ("qwen3_moe", 2, "experts"),
        ("gpt2", 2, "no plan"),
    ],
)
def test_what_does_not_split_is_refused(
    arch: str, size: int, told: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidArgument, match=told) as refused:
        RankedRunner.open(LocalRanks(size), EngineConfig(str(saved(arch)), threads=1))
    assert refused.value.field == "tensor_parallel"


def test_int8_is_refused(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("llama")), quantize="int8")
    with pytest.raises(InvalidArgument, match="quantize") as refused:
        RankedRunner.open(LocalRanks(2), config)
    assert refused.value.field == "tensor_parallel"
