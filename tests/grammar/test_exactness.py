"""An answer under a grammar is the same however, and wherever, its tokens come to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.request import FinishReason, Grammar, GrammarKind, SamplingParams
from batonlm.core.scheduler.drafts import Drafter, NgramDrafter
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.model_drafts import Drafters
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.drafting import TorchDraftModel
from batonlm.engine.runner import TorchRunner
from tests.core.drafting import Foretold
from tests.engine.modes import Heard, Watched, hand_over
from tests.engine.modes import run_out as run_to_end
from tests.grammar.answering import (
    BUNDLED,
    Answers,
    Model,
    attempt,
    from_there,
    open_model,
    run_out,
)

SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"object","properties":{"title":{"type":"string","maxLength":30},"sizes":{"type":'
    '"array","items":{"type":"integer","minimum":0,"maximum":999},"minItems":3,"maxItems":6},"on":{"type":"boolean"}},'
    '"required":["title","sizes","on"],"additionalProperties":false}',
)
TOKENS = 120
PROMPT = "Here is what you wanted to know, as an object with a title, some sizes and a flag: " * 2
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    opened = open_model(BUNDLED, num_blocks=256)
    yield opened
    opened.runner.close()


def loop_over(
    model: Model, num_blocks: int, depth: int = 1, drafter: Drafter | None = None
) -> EngineLoop:
    runner = model.runner
    scheduler = Scheduler(
        BlockPool(num_blocks, runner.block_size),
        SchedulerPolicy(headroom=1),
        runner.model,
        drafter=drafter,
    )
    return EngineLoop(Watched(runner, depth), scheduler)


def asked(model: Model, sampling: SamplingParams, choices: tuple[int, ...] = (0,)) -> Attempt:
    return attempt(
        "r",
        model,
        SCHEMA,
        max_tokens=TOKENS,
        prompt=PROMPT,
        sampling=sampling,
        choices=choices,
    )


def alone(model: Model, sampling: SamplingParams, choices: tuple[int, ...] = (0,)) -> Answers:
    loop = loop_over(model, 256)
    loop.scheduler.add(asked(model, sampling, choices), 0.0, grammar=model.compiled(SCHEMA))
    return run_out(loop, Answers())


@pytest.mark.parametrize(
    ("drafts", "depth"), [("foretold", 1), ("foretold", 2), ("ngram", 1), ("draft", 1)]
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_with_drafts(model: Model, sampling: SamplingParams, drafts: str, depth: int) -> None:
    whole = alone(model, sampling, (0, 1, 2))
    one = asked(model, sampling, (0, 1, 2))
    drafter: Drafter = NgramDrafter()
    if drafts == "draft":
        # The model's own KV in the same blocks is that of its drafts, too: it drafts for itself.
        runner = model.runner
        assert isinstance(runner, TorchRunner)
        drafter = Drafters(TorchDraftModel(runner.forward, runner.model, runner.model))
    if drafts == "foretold":
        drafter = foretold = Foretold(6)
        for choice in one.choices:
            foretold.foretell(one.token_ids, whole.of("r", choice))
    loop = loop_over(model, 256, depth, drafter)
    loop.scheduler.add(one, 0.0, grammar=model.compiled(SCHEMA))
    answers = run_out(loop, Answers())
    for choice in one.choices:
        assert answers.of("r", choice) == whole.of("r", choice)
    assert answers.finish == whole.finish
    speculation = loop.scheduler.speculation
    assert speculation is not None
    assert speculation.saved_steps > 0 or drafts == "ngram"


@pytest.mark.deep
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_resumed_behind_any_token(model: Model, sampling: SamplingParams) -> None:
    whole = alone(model, sampling)
    tokens = whole.of("r")
    assert set(whole.finish.values()) == {FinishReason.STOP}
    one = asked(model, sampling)
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        loop = loop_over(model, 256)
        rest = from_there(one, tokens[:cut], 1)
        loop.scheduler.add(rest, 0.0, grammar=model.compiled(SCHEMA))
        assert run_out(loop, Answers()).of("r") == tokens[cut:]


@pytest.mark.deep
@pytest.mark.parametrize("depth", [1, 2])
def test_choices_in_tight_rooms(model: Model, depth: int) -> None:
    """Four choices that cannot all stay: they are computed again and go on as before."""
    sampling = SAMPLINGS[1]
    choices = (0, 1, 2, 3)
    expected = alone(model, sampling, choices)
    one = asked(model, sampling, choices)
    blocks = -(-len(one.token_ids) // model.runner.block_size)
    loop = loop_over(model, blocks + 9, depth)
    loop.scheduler.add(one, 0.0, grammar=model.compiled(SCHEMA))
    answers = run_out(loop, Answers())
    assert answers.tokens == expected.tokens
    assert answers.finish == expected.finish
    assert sum(loop.scheduler.preemptions.values()) > 0
    assert answers.of("r", 0) == alone(model, sampling).of("r")
    assert len({tuple(tokens) for tokens in answers.tokens.values()}) > 1


@pytest.mark.deep
@pytest.mark.parametrize("budget", [16, 512])
def test_handed_over(model: Model, budget: int) -> None:
    sampling = SAMPLINGS[0]
    expected = alone(model, sampling).of("r")
    other = open_model(BUNDLED, num_blocks=64)
    one = asked(model, sampling)
    loop, heard = loop_over(model, 256), Heard([one])
    hand_over(other.runner, loop, one, heard, budget, model.compiled(SCHEMA))
    run_to_end(loop, heard)
    other.runner.close()
    assert heard.tokens[SequenceKey("r", 0, 0)] == expected
