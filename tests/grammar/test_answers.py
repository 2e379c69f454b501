"""Whatever JSON schema is asked for, every answer that comes to its own end parses and fits it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.request import FinishReason, Grammar, GrammarKind, SamplingParams
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.grammar.book import Compiled
from batonlm.grammar.compiler import compile_grammar, load_vocabulary
from tests.engine.tiny_models import save_tiny_model
from tests.grammar.answering import BUNDLED, Answers, Model, attempt, open_model, run_out
from tests.grammar.schemas import Schema, schemas

TOGETHER = 12
MAX_TOKENS = 300
END = 2
TOKENS = load_vocabulary(BUNDLED, special=(), eos_token_ids=(END,))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, seed=6, top_logprobs=2),
    SamplingParams(temperature=1.3, top_k=40, repetition_penalty=1.2, seed=7),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    opened: dict[str, Model] = {}
    with ExitStack() as ends:

        def model(name: str) -> Model:
            if name not in opened:
                target = tmp_path_factory.mktemp("random") / "llama"
                folder: Path = BUNDLED if name == "bundled" else save_tiny_model("llama", target)
                opened[name] = open_model(folder, num_blocks=800, max_batch=TOGETHER)
                ends.callback(opened[name].runner.close)
            return opened[name]

        yield model


def fits(schema: Schema, text: str) -> None:
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def answers_fit(model: Model, asked: list[Schema]) -> int:
    """How many of them were answered to the end."""
    runner = model.runner
    pool = BlockPool(runner.num_blocks, runner.block_size)
    policy = SchedulerPolicy(max_sequences=TOGETHER)
    loop = EngineLoop(runner, Scheduler(pool, policy, runner.model))
    for number, schema in enumerate(asked):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        one = attempt(
            str(number),
            model,
            grammar,
            max_tokens=MAX_TOKENS,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
        )
        loop.scheduler.add(one, 0.0, grammar=model.compiled(grammar))
    heard = run_out(loop, Answers())
    assert not heard.failed
    finished = [key for key, why in heard.finish.items() if why is FinishReason.STOP]
    for key in finished:
        schema = asked[int(key.request_id)]
        fits(schema, model.decode(heard.tokens[key]))
    return len(finished)


@pytest.mark.deep
@seed(3)
@settings(max_examples=150, database=None, phases=[Phase.generate])
@given(schemas(), st.integers(0, 2**32))
def test_whatever_is_drawn_of_what_is_allowed_fits(schema: Schema, drawn_by: int) -> None:
    """Without a model: every token that may follow is as likely as any other."""
    check_draws(schema, drawn_by)


def check_draws(schema: Schema, drawn_by: int) -> bool:
    """Whether an answer of random tokens came to its end."""
    draw = random.Random(drawn_by)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    matcher = Compiled(compile_grammar(TOKENS, grammar)).matcher()
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        mask = matcher.allowed(tokens, 0)
        token = draw.choice([i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1])
        if token == END:
            fits(schema, TOKENS.decode_bytes(tokens).decode())
            return True
        tokens.append(token)
    return False


@pytest.mark.deep
@pytest.mark.parametrize("name", ["bundled", "random"])
def test_some_schemas(models: Callable[[str], Model], name: str) -> None:
    finished = 0

    @seed(7)
    @settings(max_examples=1, database=None, phases=[Phase.generate])
    @given(st.lists(schemas(), min_size=TOGETHER, max_size=TOGETHER))
    def fit(asked: list[Schema]) -> None:
        nonlocal finished
        finished += answers_fit(models(name), asked)

    fit()
    assert finished > TOGETHER // 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["bundled", "random"])
def test_a_thousand_schemas(models: Callable[[str], Model], name: str) -> None:
    asked_for = finished = 0

    @seed(1000)
    @settings(
        max_examples=-(-1000 // TOGETHER),
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(schemas(), min_size=TOGETHER, max_size=TOGETHER))
    def fit(asked: list[Schema]) -> None:
        nonlocal asked_for, finished
        asked_for += len(asked)
        finished += answers_fit(models(name), asked)

    fit()
    print(f"{name}: {finished} of {asked_for} answers came to their end")
    assert asked_for >= 1000
    assert finished > asked_for // 2
