"""Ranks in every mode that a scheduler can put a sequence through, and with every way of sampling.

Tokens equal transformers' own. Among runners of one degree the probabilities are the same bits,
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batonlm.core.request.prompt_logprobs import PromptLogprobs
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, ModelRunner, SampledToken, SampleRow, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.runner import TorchRunner
from tests.core.grammars import ANY, HashGrammar, follows, mask
from tests.engine.driving import generate, random_prompts, scattered, together
from tests.engine.local_ranks import LocalRanks
from tests.engine.modes import Heard, asked, attempt, decode_loop, hand_over, run, run_out
from tests.engine.test_modes import (
    FEW,
    PLENTY,
    PROMPTS,
    SWAP_BYTES,
    Crowd,
    Judge,
    all_of_them,
    alone,
    forked,
    preempted,
)
from tests.engine.test_prompt_scores import scored
from tests.engine.tiny_models import VOCAB

Degree = tuple[int, int]
"""Ranks of a stage, stages."""

ALONE: Degree = (1, 1)
TWO: Degree = (2, 1)
FOUR: Degree = (4, 1)
STAGED: Degree = (2, 2)

Find = Callable[..., ModelRunner]


def deep(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.deep)


@pytest.fixture(scope="module")
def runner_of(saved: Callable[[str], Path]) -> Iterator[Find]:
    """A runner for all tests of a degree and way to preempt."""
    made: dict[tuple[Degree, str, str], ModelRunner] = {}

    def find(
        arch: str = "llama", degree: Degree = STAGED, *, way: str = "recompute"
    ) -> ModelRunner:
        key = degree, arch, way
        if key not in made:
            host, disk = SWAP_BYTES[way]
            config = EngineConfig(
                str(saved(arch)), num_blocks=400, threads=1,
                swap_host_bytes=host, swap_disk_bytes=disk,
            )  # fmt: skip
            made[key] = (
                TorchRunner.load(config)
                if degree == ALONE
                else RankedRunner.open(LocalRanks(*degree), config)
            )
        return made[key]

    yield find
    for runner in made.values():
        runner.close()


@pytest.fixture(scope="module")
def judge(runner_of: Find) -> Judge:
    """Of runners of STAGED ranks."""
    return Judge(runner_of)


@pytest.mark.parametrize(
    ("way", "depth"),
    [deep("swap_host", 2), *(deep(way, 1) for way in SWAP_BYTES), deep("swap_disk", 2)],
)
def test_preempted_sequences_say_the_same(
    way: str, depth: int, runner_of: Find, judge: Judge
) -> None:
    judge.check("llama", preempted(runner_of(way=way), way, depth=depth))


@pytest.mark.deep
def test_a_known_prefix_changes_nothing(runner_of: Find, judge: Judge) -> None:
    loop = decode_loop(runner_of(), PLENTY)
    run(loop, all_of_them())
    again = run(loop, all_of_them())
    judge.check("llama", again)
    assert any(again.cached.values())


ONCE = {
    (ALONE, TWO): "gemma3",
    (TWO, FOUR): "llama",
    (FOUR, ALONE): "gpt_oss",
    (FOUR, STAGED): "qwen3_moe",
    (STAGED, TWO): "llama",
}
"""Each pair of degrees with one kind of model, and each kind with a pair."""


@pytest.mark.parametrize(
    ("sender", "taker", "arch"),
    [
        pytest.param(*pair, arch, marks=pytest.mark.deep if arch == once else pytest.mark.slow)
        for pair, once in ONCE.items()
        for arch in ("llama", "gemma3", "gpt_oss", "qwen3_moe")
    ],
)
def test_handed_over_sequences_say_the_same(
    sender: Degree, taker: Degree, arch: str, runner_of: Find, judge: Judge
) -> None:
    """On a pool that holds few of them."""
    loop, heard = decode_loop(runner_of(arch, taker), FEW, depth=2), Heard()
    for one in all_of_them():
        hand_over(runner_of(arch, sender), loop, one, heard, 32)
    judge.check(arch, run_out(loop, heard), exact=False)
    assert loop.scheduler.preemptions["recompute"] > 0


@pytest.mark.deep
def test_choices_say_what_each_would_say_alone(runner_of: Find) -> None:
    runner = runner_of(way="swap_host")
    apart = [replace(one, choices=(choice,)) for one in forked() for choice in one.choices]
    loop = decode_loop(runner, 20, depth=2)
    heard, wanted = run(loop, forked()), alone(runner, apart)
    assert asked(loop)["copies"] > 0 and loop.scheduler.preemptions["swap_host"] > 0
    assert (heard.tokens, heard.logprobs) == (wanted.tokens, wanted.logprobs)


@pytest.mark.deep
@pytest.mark.parametrize("sender", [ALONE, FOUR])
def test_a_crowd_that_comes_and_is_cancelled_ends_with_the_right_tokens(
    sender: Degree, runner_of: Find
) -> None:
    met: Counter[str] = Counter()
    runner = runner_of(way="swap_host")
    for seed in range(2):
        crowd = Crowd(runner, runner_of("llama", sender), seed=seed, depth=2)
        while len(crowd.drawn) < 12:
            crowd.come()
            for _ in range(crowd.numbers.randrange(12)):
                crowd.heard.take(crowd.loop.step(0.0))
                crowd.loop.idle_check()
            if crowd.numbers.random() < 0.2:
                crowd.go()
        run_out(crowd.loop, crowd.heard)
        crowd.check()
        met.update(crowd.loop.scheduler.preemptions, cancelled=len(crowd.cancelled))
    assert met["swap_host"] > 0 and met["cancelled"] > 0


WAYS = {
    "top_k": {"temperature": 1.3, "seed": 6, "top_k": 7},
    "top_p": {"temperature": 1.0, "seed": 7, "top_p": 0.5},
    "min_p": {"temperature": 1.2, "seed": 8, "min_p": 0.2},
    "penalties": {
        "temperature": 0.9, "seed": 9, "top_k": 9, "repetition_penalty": 1.4,
        "frequency_penalty": 0.5, "presence_penalty": 0.3,
    },
    "logit_bias": {"temperature": 0.0, "logit_bias": ((5, 6.0), (900, 60.0))},
    "allowed_token_ids": {"temperature": 1.0, "seed": 3, "allowed_token_ids": (9, 77, 500, 999)},
}  # fmt: skip
"""Ways of sampling. Each leaves few tokens to draw from: a draw falls between two of them where
another degree's rounding decides, and the fewer there are the less does any."""


@pytest.mark.parametrize("degree", [STAGED, deep(TWO), deep(FOUR)])
def test_tokens_are_drawn_as_by_one_rank(degree: Degree, runner_of: Find) -> None:
    several, one = runner_of("llama", degree), runner_of("llama", ALONE)
    tables = together(len(PROMPTS), 8)
    seen = set()
    for name, settings in WAYS.items():
        params = SamplingParams(**settings)  # type: ignore[arg-type]  # of one type each
        wanted = generate(one, PROMPTS, tables, 8, params=params)
        assert generate(several, PROMPTS, tables, 8, params=params, chunk=33) == wanted, name
        seen.add(str(wanted))
    assert len(seen) == len(WAYS)


def rows_of_one_step(runner: ModelRunner) -> tuple[SampledToken, ...]:
    """Choices of one prompt, each drawn by its own temperature, seed, mask and bans."""
    allowed = mask(range(7, 400, 31))
    rows = tuple(
        SampleRow(
            choice, choice, 4,
            SamplingParams(temperature=0.4 * choice, seed=choice, top_k=5, top_logprobs=2),
            banned=(7, 38, 69) if choice % 3 else (),
            allowed=allowed if choice % 2 else b"",
        )
        for choice in range(8)
    )  # fmt: skip
    runner.submit(StepPlan(0, (Chunk(0, PROMPTS[1], 0, ((0, 3),), rows),)))
    return runner.collect().tokens


def test_rows_of_one_step_are_drawn_each_by_its_own_rules(runner_of: Find) -> None:
    several, one = (rows_of_one_step(runner_of("llama", degree)) for degree in (STAGED, ALONE))
    assert [token[:3] for token in several] == [token[:3] for token in one]
    for ours, theirs in zip(several, one, strict=True):
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


def test_a_grammar_is_followed(runner_of: Find) -> None:
    """Also where steps are planned ahead: a choice waits for its own token then."""
    said = []
    for degree in (STAGED, ALONE):
        loop = decode_loop(runner_of("llama", degree), PLENTY, depth=2)
        attempts = [attempt(f"g{i}", prompt, 9) for i, prompt in enumerate(PROMPTS[:3])]
        for i in (0, 2):
            attempts[i] = replace(attempts[i], grammar=ANY)
            loop.scheduler.add(attempts[i], 0.0, grammar=HashGrammar())
        loop.scheduler.add(attempts[1], 0.0)
        said.append(run_out(loop, Heard(attempts)).tokens)
    assert said[0] == said[1]
    texts = [said[0][one.keys()[0]] for one in attempts]
    assert [follows(text) for text in texts] == [True, False, True]
    assert [len(text) for text in texts] == [9, 9, 9]


def test_prompts_are_scored_as_by_one_rank(runner_of: Find) -> None:
    prompts = random_prompts((2, 17, 90), VOCAB)
    found: list[list[PromptLogprobs]] = [
        scored(runner_of("llama", degree), prompts, scattered(3, 8), 40)
        for degree in (STAGED, ALONE)
    ]
    for ours, theirs in zip(*found, strict=True):
        got, wanted = list(ours.entries()), list(theirs.entries())
        assert [[t for t, _ in e.top] for e in got] == [[t for t, _ in e.top] for e in wanted]
        torch.testing.assert_close(
            torch.tensor([e.logprob for e in got]),
            torch.tensor([e.logprob for e in wanted]),
            rtol=1e-4,
            atol=1e-4,
        )
