"""Log-probabilities of a prompt's own tokens, against transformers, however the prompt is cut."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.prompt_logprobs import Gathered, PromptLogprobs
from batonlm.core.scheduler.plan import Chunk, ModelRunner, SampleRow, Scored, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from batonlm.testing.fake_runner import FakeRunner
from tests.engine.driving import GREEDY, random_prompts, scattered
from tests.engine.tiny_models import VOCAB, build

TOP = 5
LENGTHS = (2, 17, 90, 130)
BLOCKS = 16


def scored(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Extents],
    chunk: int,
    num_top: int = TOP,
) -> list[PromptLogprobs]:
    """All prompts at once, each advancing by at most `chunk` positions a step."""
    gathered = [Gathered(num_top) for _ in prompts]
    for first in range(0, max(map(len, prompts)), chunk):
        chunks = []
        for i, prompt in enumerate(prompts):
            part = prompt[first : first + chunk]
            rows = (SampleRow(i, 0, 0, GREEDY),) if first + chunk >= len(prompt) else ()
            behind = Scored(prompt[first + 1 : first + len(part) + 1], num_top)
            if part:
                chunks.append(Chunk(i, part, first, tables[i], rows, behind))
        runner.submit(StepPlan(first, tuple(chunks)))
        result = runner.collect()
        assert not result.failed
        assert len(result.tokens) == sum(bool(chunk.samples) for chunk in chunks)
        for each in result.scored:
            gathered[each.sequence_id].add(each.first_position, each.logprobs)
    return [each.whole() for each in gathered]


close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
"""float32, summed in another order."""


def test_numbers_equal_transformers(saved: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    tables = scattered(len(prompts), BLOCKS)
    model = build("llama")
    answers = {}
    for exact in (True, False):
        blocks = len(prompts) * BLOCKS
        config = EngineConfig(str(saved("llama")), num_blocks=blocks, exact=exact)
        runner = TorchRunner.load(config)
        whole, cut = (scored(runner, prompts, tables, chunk) for chunk in (1000, 7))
        answers[exact] = whole
        if exact:
            assert whole == cut
        for prompt, told in zip(prompts, whole, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0, :-1].float()
            wanted = torch.log_softmax(logits, 1)
            own = wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            entries = list(told.entries())
            assert len(entries) == len(prompt) - 1
            close(torch.tensor([e.logprob for e in entries]), own)
            best = wanted.topk(TOP, 1)
            close(torch.tensor([[value for _, value in e.top] for e in entries]), best.values)
            assert [[t for t, _ in e.top] for e in entries] == best.indices.tolist()


@pytest.mark.parametrize("num_top", [0, 3])
def test_the_fake_runner_scores_what_its_memory_holds(num_top: int) -> None:
    prompts = random_prompts((2, 17, 40), 1000)
    runner = FakeRunner(num_blocks=64)
    here = scored(runner, prompts, scattered(3, 3), 1000, num_top)
    there = scored(runner, prompts, [((9 + 3 * i, 3),) for i in range(3)], 5, num_top)
    assert here == there
    assert [len(told) for told in here] == [1, 16, 39]
    assert all(told.fits and told.num_top == num_top for told in here)
    others = scored(runner, [[9, *prompt[1:]] for prompt in prompts], scattered(3, 3), 9, num_top)
    assert all(told.own[-4:] != other.own[-4:] for told, other in zip(here, others, strict=True))


def test_what_was_told_before_is_passed_over() -> None:
    def part(first: int, count: int) -> PromptLogprobs:
        numbers = range(first, first + count)
        pack = struct.Struct(f"<{count}f").pack(*numbers)
        return PromptLogprobs(1, pack, struct.pack(f"<{count}i", *numbers), pack)

    gathered = Gathered(1)
    for first, count in ((0, 4), (0, 3), (2, 4), (8, 2), (6, 1)):
        gathered.add(first, part(first, count))
    assert gathered.whole() == part(0, 7)
