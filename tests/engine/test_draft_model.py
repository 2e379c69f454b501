"""A small model drafts for a large one over the same blocks: the same tokens; what is refused.

The small one is the large one itself, whose guesses are nearly all right, or a disturbed copy of
it, whose guesses are right now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.speculation import DraftCounts
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.runner import TorchRunner
from batonlm.rpc.model_folder import check_same_tokenizer
from tests.engine.driving import random_prompts
from tests.engine.modes import (
    GREEDY,
    Heard,
    asked,
    attempt,
    decode_loop,
    hand_over,
    run,
    run_out,
)
from tests.engine.tiny_models import VOCAB, save_tiny_model

NEW_TOKENS = 40
PROMPTS = random_prompts((5, 33, 64, 75, 90, 100), VOCAB)
PLENTY, FEW = 200, 13
"""Blocks for all at once; and for the longest alone, with three to spare."""
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=11, top_logprobs=0)
PENALISED = replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.2)

Pair = Callable[..., TorchRunner]


@pytest.fixture(scope="module")
def pair(saved: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A model with one that drafts: itself, or if it is to be wrong, a copy with some noise."""
    root, made = tmp_path_factory.mktemp("drafts"), dict[tuple[Any, ...], TorchRunner]()

    def find(
        arch: str = "llama", *, wrong: bool = True, exact: bool = True, swap: int = 0
    ) -> TorchRunner:
        key = arch, wrong, exact, swap
        if key not in made:
            draft = disturbed(saved(arch), root / arch) if wrong else saved(arch)
            made[key] = TorchRunner.load(
                EngineConfig(
                    str(saved(arch)),
                    num_blocks=400,
                    exact=exact,
                    swap_host_bytes=swap,
                    draft_model=str(draft),
                )
            )
        return made[key]

    yield find
    for runner in made.values():
        runner.close()


def disturbed(folder: Path, target: Path) -> Path:
    if not target.exists():
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in network.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight += 0.05 * weight.std() * noise
        network.save_pretrained(target)
    return target


def texts(
    sampling: SamplingParams = GREEDY,
    choices: tuple[int, ...] = (0,),
    prompts: Sequence[list[int]] = PROMPTS,
) -> list[Attempt]:
    return [
        attempt(f"r{i}", prompt, NEW_TOKENS, sampling=sampling, choices=choices)
        for i, prompt in enumerate(prompts)
    ]


def drafting(runner: TorchRunner, num_blocks: int, depth: int = 1) -> EngineLoop:
    policy = SchedulerPolicy(headroom=1, speculation="draft")
    return decode_loop(runner, num_blocks, policy, depth=depth)


def plain(runner: TorchRunner, attempts: list[Attempt]) -> Heard:
    return run(decode_loop(runner, PLENTY), attempts)


def counted(loop: EngineLoop) -> DraftCounts:
    assert loop.scheduler.speculation is not None
    return loop.scheduler.speculation.counts["draft"]


def check(loop: EngineLoop, heard: Heard, expected: Heard, *, exact: bool = True) -> None:
    assert heard.tokens == expected.tokens
    if exact:
        assert heard.logprobs == expected.logprobs
    counts = counted(loop)
    assert 0 < counts.accepted < counts.drafted
    assert counts.saved_steps > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.deep) for each in ("gemma2", "qwen3_moe")),
        pytest.param("deepseek_v3", marks=pytest.mark.deep),
    ],
)
def test_the_tokens_are_the_same(arch: str, exact: bool, depth: int, pair: Pair) -> None:
    runner = pair(arch, exact=exact)
    loop = drafting(runner, PLENTY, depth)
    check(loop, run(loop, texts()), plain(runner, texts()), exact=exact)


def test_a_model_that_drafts_for_itself_is_nearly_always_right(pair: Pair) -> None:
    runner = pair(wrong=False)
    loop = drafting(runner, PLENTY)
    assert run(loop, texts()).tokens == plain(runner, texts()).tokens
    counts = counted(loop)
    assert counts.accepted > 0.8 * counts.drafted > 0


@pytest.mark.parametrize("sampling", [DRAWN, PENALISED], ids=["drawn", "penalised"])
def test_choices_that_are_sampled_are_the_same(sampling: SamplingParams, pair: Pair) -> None:
    runner, several = pair(wrong=False), texts(sampling, (0, 1, 2), PROMPTS[:3])
    loop = drafting(runner, PLENTY)
    check(loop, run(loop, several), plain(runner, several))
    assert asked(loop)["copies"] > 0


@pytest.mark.parametrize("swap", [0, 1 << 24], ids=["computed again", "swapped"])
def test_preempted_sequences_are_the_same(swap: int, pair: Pair) -> None:
    runner = pair(swap=swap)
    loop = drafting(runner, FEW)
    check(loop, run(loop, texts()), plain(runner, texts()))
    assert loop.scheduler.preemptions["swap_host" if swap else "recompute"] > 0


def test_the_tokens_behind_a_hand_over_are_the_same(pair: Pair) -> None:
    sender, taker = pair(), pair(swap=1 << 24)
    loop, heard = drafting(taker, PLENTY), Heard()
    for one in texts():
        hand_over(sender, loop, one, heard, 32)
    check(loop, run_out(loop, heard), plain(sender, texts()))


def test_those_that_find_their_prefix_are_the_same(pair: Pair) -> None:
    runner = pair()
    loop = drafting(runner, PLENTY)
    first = run(loop, texts())
    again = run(loop, texts())
    assert again.tokens == first.tokens
    assert any(again.cached.values())
    check(loop, again, plain(runner, texts()))


def test_guesses_are_those_of_its_own_logits(pair: Pair) -> None:
    """Over KV that was computed in parts, in blocks that lie apart."""
    runner = pair(wrong=False)
    draft, numbers = runner.draft_model, random.Random(1)
    assert draft is not None
    tokens = [numbers.randrange(VOCAB) for _ in range(70)]
    wanted = (SampleRow(0, 0, 0, SamplingParams(temperature=0.0)),)
    extents = ((7, 1), (90, 2), (40, 2))
    none, _ = draft.compute([Chunk(0, tokens[:50], 0, extents)])
    (guess,), seconds = draft.compute([Chunk(0, tokens[50:], 50, extents, wanted)])
    logits = runner.forward(StepPlan(0, (Chunk(0, tokens, 0, extents, wanted),)))[0].float()
    assert none == [] and seconds > 0
    assert guess.token_id == int(logits.argmax())
    assert guess.probability == pytest.approx(float(logits.softmax(0).max()), abs=1e-3)


def test_a_block_is_as_large_as_both_models_need(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("llama")), kv_memory_bytes=1 << 20)
    alone = foresee(config, 1 << 32).memory
    both = foresee(replace(config, draft_model=config.model), 1 << 32).memory
    assert both.num_blocks == alone.num_blocks // 2
    assert both.draft_block_bytes == both.block_bytes == alone.block_bytes
    assert both.taken_bytes >= alone.taken_bytes - alone.block_bytes + alone.weights_bytes
    assert any(name == "draft model" for name, _ in both.lines())
    assert all(name != "draft model" for name, _ in alone.lines())


@pytest.mark.parametrize(
    ("arch", "why"), [("mamba", "KV has to be in blocks"), ("", "neither a folder nor a hub id")]
)
def test_what_cannot_draft_is_refused_by_name(
    arch: str, why: str, saved: Callable[[str], Path]
) -> None:
    draft = str(saved(arch)) if arch else "/nowhere/at/all"
    config = EngineConfig(str(saved("llama")), num_blocks=64, draft_model=draft)
    with pytest.raises(InvalidArgument, match=why) as raised:
        foresee(config)
    assert raised.value.field == "draft_model"


def test_other_vocabularies_are_refused_by_name(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    other = save_tiny_model("llama", tmp_path / "other", vocab_size=VOCAB + 2000)
    config = EngineConfig(str(saved("llama")), num_blocks=64, draft_model=str(other))
    with pytest.raises(InvalidArgument, match="tokenizer") as raised:
        TorchRunner.load(config)
    assert raised.value.field == "draft_model"
    check_same_tokenizer(saved("llama"), other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|user|>"', '"<|human|>"'))
    with pytest.raises(InvalidArgument, match="human") as raised:
        check_same_tokenizer(saved("llama"), other)
    assert raised.value.field == "draft_model"
