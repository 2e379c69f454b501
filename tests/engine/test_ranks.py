"""Ranks in one process, over real gloo: tokens equal transformers', KV fits one rank's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.scheduler.plan import PENDING, BlockSwap, Chunk, SampleRow, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.runner import TorchRunner
from batonlm.transfer.staging import HostMemory, StagingPool
from tests.engine import test_runner_contract as contract
from tests.engine.driving import (
    GREEDY,
    fill,
    generate,
    packed,
    random_prompts,
    scattered,
    together,
    verify,
)
from tests.engine.local_ranks import LocalRanks
from tests.engine.machine import needs_int8
from tests.engine.modes import attempt, decode_loop, run
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB

LENGTHS = (1, 5, 16, 33, 65, 90)
NEW = 6
BLOCKS = -(-(max(LENGTHS) + NEW) // 16)

Open = Callable[..., RankedRunner]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens a runner of several ranks; the same one for the same model."""
    known: dict[tuple[Path, int, int, int], RankedRunner] = {}
    with ExitStack() as ends:

        def open_ranks(
            folder: Path, tensor: int = 2, stages: int = 1, number: int = 0
        ) -> RankedRunner:
            key = folder, tensor, stages, number
            if key not in known:
                config = EngineConfig(str(folder), num_blocks=64, threads=1)
                known[key] = RankedRunner.open(LocalRanks(tensor, stages), config)
                ends.callback(known[key].close)
            return known[key]

        yield open_ranks


def one_rank(folder: Path) -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(folder), num_blocks=64))


def deep(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.deep)


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "arch, tensor, stages",
    [
        ("llama", 2, 2),
        ("qwen3_moe", 2, 1),
        deep("qwen3_moe", 4, 1),
        deep("llama", 2, 1),
        deep("llama", 4, 1),
        deep("llama_tied", 2, 2),
        deep("qwen3", 2, 1),
        deep("mixtral", 2, 2),
        deep("gpt_oss", 2, 2),
        deep("deepseek_v3", 2, 2),
        slow("deepseek_v3", 4, 1),
        slow("glm4_moe_lite", 2, 1),
        slow("youtu", 2, 1),
        slow("llama", 1, 3),
        slow("qwen2", 2, 1),
        slow("mistral", 2, 1),
        slow("gemma2", 2, 1),
        slow("gemma3", 2, 2),
        slow("smollm3", 2, 1),
        slow("granite", 2, 1),
        slow("glm4", 2, 1),
        slow("cohere", 2, 1),
    ],
)
def test_tokens_equal_transformers_and_kv_moves_between_degrees(
    arch: str, tensor: int, stages: int, saved: Callable[[str], Path], ranked: Open
) -> None:
    several, one = ranked(saved(arch), tensor, stages), one_rank(saved(arch))
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected(arch, prompts, NEW)
    here, there = together(len(prompts), BLOCKS), scattered(len(prompts), BLOCKS)
    assert several.exact and several.layout == one.layout
    assert several.num_blocks == one.num_blocks
    for chunk in (10_000, 7):
        assert generate(several, prompts, there, NEW, chunk=chunk) == wanted
    for sender, taker in ((several, one), (one, several)):
        for prompt, source, target in zip(prompts, here, there, strict=True):
            count = min(40, len(prompt) - 1)
            if count:
                fill(sender, prompt[:count], source)
                taker.unpack(target, 0, count, memoryview(packed(sender, source, 0, count)))
        assert generate(taker, prompts, there, NEW, start=40) == wanted


@pytest.mark.parametrize(
    "arch, tensor, stages",
    [
        ("llama", 2, 1),
        deep("llama", 2, 2),
        deep("gpt_oss", 2, 1),
        deep("qwen3_moe", 4, 1),
        deep("qwen2", 2, 1),
    ],
)
def test_ranks_use_the_fused_decoder(
    arch: str,
    tensor: int,
    stages: int,
    saved: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And it gives the tokens of transformers' own."""
    prompts = random_prompts(LENGTHS, VOCAB)
    with caplog.at_level("INFO", "batonlm.engine.runner"):
        for name in ("auto", "transformers"):
            config = EngineConfig(str(saved(arch)), num_blocks=64, threads=1, decoder=name)
            runner = RankedRunner.open(LocalRanks(tensor, stages), config)
            try:
                tokens = generate(runner, prompts, together(len(prompts), BLOCKS), NEW)
            finally:
                runner.close()
            assert tokens == expected(arch, prompts, NEW), name
    said = [message for message in caplog.messages if "decoder" in message]
    assert said == ["decoder: fused"] * (tensor * stages)


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
    check(lambda: ranked(saved("llama"), 2, 1, next(numbers)))


def test_nothing_to_collect_is_an_error_and_close_is_idempotent(
    saved: Callable[[str], Path], ranked: Open
) -> None:
    runner = ranked(saved("llama"), 2, 1, 1)
    with pytest.raises(Internal):
        runner.collect()
    runner.close()
    runner.close()


def test_tokens_that_are_not_known_yet_are_passed_on(
    saved: Callable[[str], Path], ranked: Open
) -> None:
    """Each step is submitted before the one before it is collected."""
    runner, (prompt,) = ranked(saved("llama"), 2, 2), random_prompts((20,), VOCAB)
    table = ((0, 2),)
    rows = [SampleRow(0, 0, i, GREEDY) for i in range(NEW)]
    runner.submit(StepPlan(0, (Chunk(0, prompt, 0, table, (rows[0],)),)))
    tokens = []
    for i in range(1, NEW):
        chunk = Chunk(0, (PENDING,), len(prompt) + i - 1, table, (rows[i],))
        runner.submit(StepPlan(i, (chunk,)))
        tokens += [token.token_id for token in runner.collect().tokens]
    tokens += [token.token_id for token in runner.collect().tokens]
    assert [tokens] == expected("llama", [prompt], NEW)


def test_copies_run_beside_a_step(saved: Callable[[str], Path], ranked: Open) -> None:
    runner = ranked(saved("llama"))
    long, short = random_prompts((400, 40), VOCAB)
    fill(runner, short, ((40, 3),))
    wanted = packed(runner, ((40, 3),), 0, 40)
    runner.submit(StepPlan(1, (Chunk(0, long, 0, ((0, 25),)),)))
    assert packed(runner, ((40, 3),), 0, 40) == wanted
    assert runner.collect().step == 1


@needs_int8
def test_int8_weights_are_split(saved: Callable[[str], Path]) -> None:
    """Scales differ from one rank's, which has longer rows; exactness holds among the ranks."""
    config = EngineConfig(str(saved("llama")), num_blocks=64, threads=1, quantize="int8")
    runner, prompts = RankedRunner.open(LocalRanks(2), config), random_prompts(LENGTHS, VOCAB)
    try:
        assert runner.exact and runner.model.digest.endswith("-int8")
        tables = together(len(prompts), BLOCKS)
        apart = [
            generate(runner, [prompt], [table], NEW)[0]
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        assert generate(runner, prompts, tables, NEW, chunk=7) == apart
    finally:
        runner.close()


def test_blocks_are_swapped_on_every_rank(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(
        str(saved("llama")), num_blocks=64, threads=1,
        swap_host_bytes=1 << 19, swap_disk_bytes=1 << 19,
    )  # fmt: skip
    runner, (prompt,) = RankedRunner.open(LocalRanks(2, 2), config), random_prompts((40,), VOCAB)
    try:
        host, disk = runner.num_swap_blocks
        assert host >= 3 and disk >= 3
        table, there = ((0, 3),), ((7, 3),)
        fill(runner, prompt, table)
        wanted = packed(runner, table, 0, 40)
        stored = tuple(range(host - 1, host + 2))
        runner.submit(StepPlan(1, (), swap_out=(BlockSwap((0, 1, 2), stored),)))
        assert runner.collect().swap_s > 0
        runner.submit(StepPlan(2, (), swap_in=(BlockSwap((7, 8, 9), stored),)))
        assert runner.collect().swap_s > 0
        assert packed(runner, there, 0, 40) == wanted
    finally:
        runner.close()


@pytest.mark.parametrize(
    "arch, size, told",
    [
        ("llama", 3, "num_attention_heads 4"),
        ("phi3", 2, "qkv_proj"),
        ("olmo2", 2, "q_proj"),
        ("gpt2", 2, "no plan"),
    ],
)
def test_what_does_not_split_is_refused(
    arch: str, size: int, told: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidArgument, match=told) as refused:
        RankedRunner.open(LocalRanks(size), EngineConfig(str(saved(arch)), threads=1))
    assert refused.value.field == "tensor_parallel"


@pytest.mark.parametrize(
    ("settings", "size", "field"),
    [({}, 3, "tensor_parallel"), ({"max_model_len": 1 << 11, "num_blocks": 9}, 2, "max_model_len")],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    settings: dict[str, Any], size: int, field: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """There are none here."""
    shutil.copy(saved("llama") / "config.json", tmp_path)
    with pytest.raises(InvalidArgument) as refused:
        RankedRunner.open(LocalRanks(size), EngineConfig(str(tmp_path), threads=1, **settings))
    assert refused.value.field == field


@pytest.mark.parametrize(
    "arch, stages, told",
    [("gpt2", 2, "no plan to stage"), ("llama", 4, "fewer layers"), ("granite", 2, "changes")],
)
def test_what_cannot_be_staged_is_refused(
    arch: str, stages: int, told: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidArgument, match=told) as refused:
        RankedRunner.open(LocalRanks(1, stages), EngineConfig(str(saved(arch)), threads=1))
    assert refused.value.field == "pipeline_parallel"


@pytest.mark.parametrize("tensor, stages", [(2, 2), deep(2, 1)])
def test_drafts_change_no_token(
    tensor: int, stages: int, saved: Callable[[str], Path], ranked: Open
) -> None:
    runner = ranked(saved("llama"), tensor, stages)
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected("llama", prompts, NEW)
    found, steps = verify(runner, prompts, scattered(len(prompts), BLOCKS), wanted)
    assert found == wanted
    assert steps < NEW
