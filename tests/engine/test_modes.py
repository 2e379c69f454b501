"""Tokens equal transformers' own in every mode that a scheduler can put a sequence through.

In exact mode the probabilities are the same bits, too. Each test makes sure that its mode happened.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest

from batonlm.core.request.attempt import Attempt, AttemptKey, SequenceKey
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.core.drafting import Foretold
from tests.engine.driving import random_prompts
from tests.engine.modes import Heard, asked, attempt, decode_loop, hand_over, run, run_out
from tests.engine.test_parity import expected
from tests.engine.tiny_models import ARCHS, VOCAB

NEW_TOKENS = 32
PROMPTS = random_prompts((5, 33, 64, 75, 90, 100), VOCAB)
PLENTY, FEW = 200, 12
"""Blocks for all six at once; and for the longest alone, with three to spare."""

SWAP_BYTES = {"recompute": (0, 0), "swap_host": (1 << 24, 0), "swap_disk": (0, 1 << 24)}
SOME = [
    *(("llama", way) for way in SWAP_BYTES),
    ("gemma2", "swap_disk"),
    ("deepseek_v3", "swap_host"),
]
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=11, top_logprobs=0)

NAMES = [f"r{i}" for i in range(len(PROMPTS))]

LoadRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def runner_of(saved: Callable[[str], Path]) -> Iterator[LoadRunner]:
    """A runner for all tests of an architecture; what others left in its memory is still there."""
    made: dict[tuple[str, bool, str], TorchRunner] = {}

    def find(arch: str = "llama", *, exact: bool = True, way: str = "recompute") -> TorchRunner:
        key = arch, exact, way
        if key not in made:
            host, disk = SWAP_BYTES[way]
            config = EngineConfig(
                str(saved(arch)),
                num_blocks=400,
                exact=exact,
                swap_host_bytes=host,
                swap_disk_bytes=disk,
            )
            made[key] = TorchRunner.load(config)
            assert made[key].exact == exact, made[key].not_exact_because
        return made[key]

    yield find
    for runner in made.values():
        runner.close()


@cache
def wanted(arch: str) -> list[list[int]]:
    """What transformers generates for PROMPTS."""
    return expected(arch, PROMPTS, NEW_TOKENS)


def all_of_them() -> list[Attempt]:
    return [attempt(n, prompt, NEW_TOKENS) for n, prompt in zip(NAMES, PROMPTS, strict=True)]


def alone(runner: ModelRunner, attempts: Iterable[Attempt]) -> Heard:
    """Each run by itself, one after the other, nothing shared."""
    heard = Heard()
    for one in attempts:
        loop = decode_loop(runner, PLENTY)
        loop.scheduler.add(one, 0.0)
        run_out(loop, heard)
    return heard


class Judge:
    """Knows what all of them say undisturbed, per architecture; in exact mode, bit for bit."""

    def __init__(self, load: LoadRunner):
        self._load = load
        self._heard: dict[str, Heard] = {}

    def check(
        self, arch: str, heard: Heard, names: Sequence[str] = NAMES, *, exact: bool = True
    ) -> None:
        """names: of attempts at PROMPTS, in order and over again. What was said before an attempt
        went on from it was not drawn again, so it has no bits."""
        for i, name in enumerate(names):
            assert heard.tokens[SequenceKey(name, 0, 0)] == wanted(arch)[i % len(PROMPTS)]
            if exact:
                bits = heard.logprobs[SequenceKey(name, 0, 0)]
                whole = self._undisturbed(arch).logprobs[SequenceKey(NAMES[i % len(PROMPTS)], 0, 0)]
                assert bits == whole[len(whole) - len(bits) :]

    def _undisturbed(self, arch: str) -> Heard:
        if arch not in self._heard:
            self._heard[arch] = alone(self._load(arch), all_of_them())
        return self._heard[arch]


@pytest.fixture(scope="module")
def judge(runner_of: LoadRunner) -> Judge:
    return Judge(runner_of)


def preempted(runner: ModelRunner, way: str, *, depth: int = 1) -> Heard:
    """All of them where few have room at once."""
    loop = decode_loop(runner, FEW, depth=depth)
    heard = run(loop, all_of_them())
    assert loop.scheduler.preemptions[way] > 0
    assert (asked(loop)["swapped in"] > 0) == (way != "recompute")
    assert (asked(loop)["pending"] > 0) == (depth > 1)
    return heard


@pytest.mark.deep
@pytest.mark.parametrize(("arch", "way"), SOME)
def test_preempted_sequences_say_the_same(
    arch: str, way: str, runner_of: LoadRunner, judge: Judge
) -> None:
    judge.check(arch, preempted(runner_of(arch, way=way), way))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("way", SWAP_BYTES)
@pytest.mark.parametrize("arch", ARCHS)
def test_preempted_sequences_of_every_architecture_say_the_same(
    arch: str, way: str, exact: bool, runner_of: LoadRunner, judge: Judge
) -> None:
    runner = runner_of(arch, way=way, exact=exact)
    judge.check(arch, preempted(runner, way), exact=exact)


@pytest.mark.parametrize("way", SWAP_BYTES)
def test_planning_ahead_changes_nothing(way: str, runner_of: LoadRunner, judge: Judge) -> None:
    judge.check("llama", preempted(runner_of(way=way), way, depth=2))


def test_a_known_prefix_changes_nothing(runner_of: LoadRunner, judge: Judge) -> None:
    """The second time, all full blocks but the one with the last position are known."""
    loop = decode_loop(runner_of(), PLENTY)
    run(loop, all_of_them())
    again = run(loop, all_of_them())
    judge.check("llama", again)
    known = {f"r{i}": (len(prompt) - 1) // 16 * 16 for i, prompt in enumerate(PROMPTS)}
    assert again.cached == known


@pytest.mark.parametrize("token_budget", [96, 32])
@pytest.mark.parametrize("num_blocks", [PLENTY, FEW])
def test_handed_over_sequences_say_the_same(
    num_blocks: int, token_budget: int, runner_of: LoadRunner, judge: Judge
) -> None:
    sender, taker = runner_of(), runner_of(way="swap_host")
    loop, heard = decode_loop(taker, num_blocks), Heard()
    for one in all_of_them():
        hand_over(sender, loop, one, heard, token_budget)
    judge.check("llama", run_out(loop, heard))
    assert bool(loop.scheduler.preemptions) == (num_blocks == FEW)


@pytest.mark.parametrize("accepted", [1, 17, 30])
def test_an_attempt_goes_on_where_another_worker_stopped(
    accepted: int, runner_of: LoadRunner, judge: Judge
) -> None:
    so_far = [text[:accepted] for text in wanted("llama")]
    attempts = [
        attempt(name, prompt, NEW_TOKENS, accepted=text)
        for name, prompt, text in zip(NAMES, PROMPTS, so_far, strict=True)
    ]
    judge.check("llama", run(decode_loop(runner_of(), PLENTY), attempts))


@pytest.mark.deep
@pytest.mark.parametrize(("size", "prefill_budget"), [(3, 256), (7, 16), (33, 48), (64, 256)])
def test_neighbours_and_chunks_change_nothing(
    size: int, prefill_budget: int, runner_of: LoadRunner, judge: Judge
) -> None:
    policy = SchedulerPolicy(max_sequences=size, prefill_budget=prefill_budget, token_budget=512)
    loop = decode_loop(runner_of(), 400, policy)
    names = [f"r{i}" for i in range(max(size, len(PROMPTS)))]
    repeated = zip(names, cycle(PROMPTS), strict=False)
    heard = run(loop, [attempt(name, prompt, NEW_TOKENS) for name, prompt in repeated])
    judge.check("llama", heard, names)
    assert asked(loop)["most chunks"] == size


def said_apart(runner: ModelRunner) -> Heard:
    """What choices say that nobody else is asked for."""
    apart = [replace(one, choices=(choice,)) for one in forked() for choice in one.choices]
    return alone(runner, apart)


def forked() -> list[Attempt]:
    """Whose prompts end within a block, so that their choices copy it when they write."""
    return [
        attempt(f"r{i}", PROMPTS[i], NEW_TOKENS, sampling=DRAWN, choices=(0, 1, 2, 5))
        for i in (1, 3)
    ]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("arch", "num_blocks", "way"),
    [
        ("llama", PLENTY, "recompute"),
        ("llama", 20, "swap_host"),
        ("deepseek_v3", 20, "swap_host"),
    ],
)
def test_choices_say_what_each_would_say_alone(
    arch: str, num_blocks: int, way: str, runner_of: LoadRunner
) -> None:
    loop = decode_loop(runner_of(arch, way=way), num_blocks)
    apart, heard = said_apart(runner_of(arch)), run(loop, forked())
    assert asked(loop)["copies"] > 0
    assert (loop.scheduler.preemptions.get(way, 0) > 0) == (num_blocks == 20)
    assert heard.tokens == apart.tokens
    assert heard.logprobs == apart.logprobs
    assert len({tuple(text) for text in heard.tokens.values()}) == 8


def foretold(arch: str, wrong_every: int = 4) -> Foretold:
    """Knows what is said to PROMPTS."""
    drafter = Foretold(wrong_every)
    for prompt, text in zip(PROMPTS, wanted(arch), strict=True):
        drafter.foretell(prompt, text)
    return drafter


def took_drafts(loop: EngineLoop) -> bool:
    """Whether right drafts and wrong ones were computed."""
    speculation = loop.scheduler.speculation
    assert speculation is not None
    return 0 < speculation.accepted < speculation.drafted == asked(loop)["drafts"]


@pytest.mark.parametrize(
    ("arch", "way", "depth"),
    [
        *(("llama", way, depth) for way in SWAP_BYTES for depth in (1, 2)),
        ("gemma3", "swap_host", 2),
        *(
            pytest.param("gemma3", way, depth, marks=pytest.mark.deep)
            for way in SWAP_BYTES
            for depth in (1, 2)
            if (way, depth) != ("swap_host", 2)
        ),
    ],
)
def test_drafts_change_nothing_where_sequences_are_preempted(
    arch: str, way: str, depth: int, runner_of: LoadRunner, judge: Judge
) -> None:
    drafter = foretold(arch)
    loop = decode_loop(runner_of(arch, way=way), FEW, depth=depth, drafter=drafter)
    judge.check(arch, run(loop, all_of_them()))
    assert took_drafts(loop)
    assert loop.scheduler.preemptions[way] > 0
    assert not drafter.known


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "arch",
    ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"],
)
def test_drafts_change_nothing_in_one_batch(
    arch: str, exact: bool, runner_of: LoadRunner, judge: Judge
) -> None:
    """Nor for those who find what others left in the prefix cache."""
    loop = decode_loop(runner_of(arch, exact=exact), PLENTY, drafter=foretold(arch))
    heard = run(loop, all_of_them())
    longer = [
        attempt(name, prompt, NEW_TOKENS, accepted=text[:-1])
        for name, prompt, text in zip(NAMES, PROMPTS, wanted(arch), strict=True)
    ]
    again = run(loop, longer)
    judge.check(arch, heard, exact=exact)
    judge.check(arch, again, exact=exact)
    assert all(count > len(p) for count, p in zip(again.cached.values(), PROMPTS, strict=True))
    assert took_drafts(loop)


@pytest.mark.parametrize("num_blocks", [PLENTY, FEW])
def test_drafts_change_nothing_behind_a_hand_over(
    num_blocks: int, runner_of: LoadRunner, judge: Judge
) -> None:
    sender, taker = runner_of(), runner_of(way="swap_host")
    loop, heard = decode_loop(taker, num_blocks, drafter=foretold("llama")), Heard()
    for one in all_of_them():
        hand_over(sender, loop, one, heard, 32)
    judge.check("llama", run_out(loop, heard))
    assert took_drafts(loop)


@pytest.mark.parametrize(
    "sampling", [DRAWN, replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.2)]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_nothing_of_choices_that_are_sampled(
    depth: int, sampling: SamplingParams, runner_of: LoadRunner
) -> None:
    several = [replace(one, sampling=sampling) for one in forked()]
    apart = [replace(one, choices=(choice,)) for one in several for choice in one.choices]
    expected, drafter = alone(runner_of(), apart), Foretold(5)
    for one in apart:
        drafter.foretell(one.token_ids, expected.tokens[one.keys()[0]])
    loop = decode_loop(runner_of(), 40, depth=depth, drafter=drafter)
    heard = run(loop, several)
    assert heard.tokens == expected.tokens
    assert heard.logprobs == expected.logprobs
    assert took_drafts(loop)


@pytest.mark.parametrize("exact", [True, False])
def test_drafts_from_the_text_itself_change_nothing(exact: bool, runner_of: LoadRunner) -> None:
    runner = runner_of(exact=exact)
    # A low temperature and a bias towards some tokens: the model goes round.
    sampling = SamplingParams(
        temperature=0.6, seed=3, logit_bias=tuple((token, 9.0) for token in range(40, 48))
    )
    attempts = [
        attempt(name, prompt, 80, sampling=replace(sampling, seed=i))
        for i, (name, prompt) in enumerate(zip(NAMES, PROMPTS, strict=True))
    ]
    plain = run(decode_loop(runner, PLENTY), attempts)
    loop = decode_loop(runner, PLENTY, SchedulerPolicy(headroom=1, speculation="ngram"))
    assert run(loop, attempts).tokens == plain.tokens
    assert loop.scheduler.speculation is not None
    assert loop.scheduler.speculation.drafted > 0


class Crowd:
    """Random requests that come and go, on a pool that holds one or two of them."""

    def __init__(
        self,
        runner: ModelRunner,
        sender: ModelRunner,
        *,
        seed: int,
        depth: int,
        drafter: Foretold | None = None,
    ):
        self.numbers = random.Random(seed)
        self.loop = decode_loop(runner, FEW, depth=depth, drafter=drafter)
        self.sender = sender
        self.heard = Heard()
        self.drawn: list[tuple[Attempt, int]] = []
        self.cancelled: set[AttemptKey] = set()

    def come(self) -> None:
        """One more, computed here or, if there is room for it, handed over."""
        numbers, number = self.numbers, len(self.drawn)
        which = numbers.randrange(len(PROMPTS))
        prompt = PROMPTS[which]
        accepted = wanted("llama")[which][: numbers.choice([0, 0, 0, 1, 20])]
        one = attempt(
            f"r{number}",
            prompt,
            numbers.randint(len(accepted) + 1, NEW_TOKENS),
            accepted=accepted,
            choices=(0, 1) if len(prompt) < 40 and numbers.random() < 0.5 else (0,),
            priority=numbers.randrange(2),
        )
        self.heard.expect(one)
        self.drawn.append((one, which))
        if numbers.random() < 0.3:
            hand_over(self.sender, self.loop, one, self.heard, 48)
        else:
            self.loop.scheduler.add(one, 0.0)

    def go(self) -> None:
        one, _ = self.numbers.choice(self.drawn)
        self.loop.scheduler.cancel(one.key)
        self.cancelled.add(one.key)

    def check(self) -> None:
        for one, which in self.drawn:
            keys = one.keys()
            for key in keys:
                said = self.heard.tokens[key]
                assert said == wanted("llama")[which][: len(said)]
                if one.key not in self.cancelled:
                    assert len(said) == one.stop.max_tokens


@pytest.mark.deep
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_on_a_pool_far_too_small_ends_with_the_right_tokens(
    depth: int, drafts: bool, saved: Callable[[str], Path], runner_of: LoadRunner
) -> None:
    """Swap memory is small, too: what fits neither the host's part nor the disk's is computed
    again."""
    sender = runner_of()
    block_bytes = sender.layout.bytes_per_position * sender.block_size
    config = EngineConfig(
        str(saved("llama")),
        num_blocks=FEW,
        swap_host_bytes=6 * block_bytes,
        swap_disk_bytes=9 * block_bytes,
    )
    runner, met = TorchRunner.load(config), Counter[str]()
    try:
        for seed in range(2):
            drafter = foretold("llama") if drafts else None
            crowd = Crowd(runner, sender, seed=seed, depth=depth, drafter=drafter)
            while len(crowd.drawn) < 12:
                crowd.come()
                for _ in range(crowd.numbers.randrange(12)):
                    crowd.heard.take(crowd.loop.step(0.0))
                    crowd.loop.idle_check()
                if crowd.numbers.random() < 0.15:
                    crowd.go()
            run_out(crowd.loop, crowd.heard)
            crowd.check()
            met.update(crowd.loop.scheduler.preemptions)
    finally:
        runner.close()
    assert met["recompute"] > 0 and met["swap_host"] + met["swap_disk"] > 0
