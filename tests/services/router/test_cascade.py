"""A name with a small and a large model: who answers, what the client sees, who is charged.

The scripted models say what a test writes. The letters p, i, b and w have a probability of 1 here,
others less.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import (
    BatonError,
    ContextLengthExceeded,
    Internal,
    InvalidArgument,
    Unavailable,
)
from batonlm.core.request.request import (
    ChatPrompt,
    Grammar,
    GrammarKind,
    Message,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Tool,
)
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.cascade import Cascade, Policy, PolicyKind
from batonlm.router.config import RouterConfig
from batonlm.testing.language import says
from batonlm.testing.scripted import ScriptedWorker
from tests.services.router.conftest import PATIENCE_S, Answer, World, until
from tests.services.router.test_many_models import workers_of

CONFIG = RouterConfig(local_prefill_tokens=0, wait_timeout_s=PATIENCE_S)
SURE, UNSURE = "pibiwibipibi", "vvvvvvvvvvvvvvvv"
LOGPROB = Policy(PolicyKind.LOGPROB, 0.9, tokens=4)
MARGIN = Policy(PolicyKind.MARGIN, 0.4, tokens=4)


def ask(text: str, **changed: object) -> Request:
    """A request to which every model says the text."""
    prompt = ChatPrompt((Message("user", says(text)),))
    request = Request(prompt, model="auto", max_tokens=64, seed=1)
    return replace(request, **changed)  # type: ignore[arg-type]


async def start(
    world: World, policy: Policy = LOGPROB, *, tokenizer: str = "t1", config: RouterConfig = CONFIG
) -> None:
    """tokenizer: of the large model; the small one's is t1."""
    world.aliases["auto"] = Alias((("small", 1),), cascade=Cascade("large", policy))
    workers_of(world, "small", digest="d1", tokenizer="t1")
    workers_of(world, "large", digest="d2", tokenizer=tokenizer)
    await world.run(config)


def answered(world: World) -> tuple[float, float]:
    """The answers of the small and of the large model."""
    name = "baton_cascade_answers_total"
    return tuple(world.counted(name, alias="auto", by=by) for by in ("small", "large"))  # type: ignore[return-value]


def alone(world: World, reason: str) -> float:
    return world.counted("baton_cascade_alone_total", alias="auto", reason=reason)


def asked(world: World) -> tuple[int, int]:
    return len(world.decodes[0].starts), len(world.decodes[1].starts)


def check(answer: Answer, text: str, model: str) -> None:
    assert (answer.accepted.model, answer.texts[0]) == (model, text)
    assert answer.finished is not None
    assert answer.finished.completion_tokens == len(text) + 1
    assert bool(answer.finished.tried_tokens) == (model == "large")


@pytest.mark.parametrize("policy", [LOGPROB, MARGIN], ids=["logprob", "margin"])
async def test_the_small_model_answers_what_it_is_sure_of(world: World, policy: Policy) -> None:
    await start(world, policy)
    answer = await world.ask(ask(SURE))
    check(answer, SURE, "small")
    assert not any(delta.logprobs for delta in answer.deltas), "they were not asked for"
    assert asked(world) == (1, 0)
    answer = await world.ask(ask(UNSURE))
    check(answer, UNSURE, "large")
    assert asked(world) == (2, 1)
    assert answered(world) == (1, 1)
    await until(world.nothing_left)


async def test_both_models_are_charged_to_the_tenant_and_told(world: World) -> None:
    await start(world)
    request = ask(UNSURE, tenant=Tenant("one"))
    answer = await world.ask(request)
    check(answer, UNSURE, "large")
    assert answer.finished is not None
    prompt, tried = answer.finished.prompt_tokens, answer.finished.tried_tokens
    # The small model's answer was looked at when it had four tokens, and ended then or a bit later.
    assert prompt + 4 <= tried <= prompt + len(UNSURE) + 1
    spent = {
        kind: world.counted("baton_tenant_tokens_total", tenant="one", kind=kind)
        for kind in ("prompt", "output")
    }
    assert spent["prompt"] == 2 * prompt
    assert sum(spent.values()) == prompt + len(UNSURE) + 1 + tried
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "baton",
        "gen_ai_request_model": "auto",
        "gen_ai_response_model": "large",
        "error_type": "",
    }
    assert world.counted("gen_ai_server_request_duration_seconds_count", **labels) == 1
    await until(world.nothing_left)


async def test_log_probabilities_are_those_that_were_asked_for(world: World) -> None:
    await start(world, MARGIN)
    for text in (SURE, UNSURE):
        answer = await world.ask(ask(text, sampling=SamplingParams(top_logprobs=1)))
        entries = [entry for delta in answer.deltas for entry in delta.logprobs]
        assert len(entries) == len(text) + 1
        assert {len(entry.top) for entry in entries} == {1}


async def test_all_choices_count_and_come_from_one_model(world: World) -> None:
    await start(world)
    for text, model in ((SURE, "small"), (UNSURE, "large")):
        answer = await world.ask(ask(text, n=3))
        assert answer.accepted.model == model
        assert answer.texts == {0: text, 1: text, 2: text}
    await until(world.nothing_left)


async def test_a_call_of_a_tool_comes_from_one_model(world: World) -> None:
    await start(world)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    for threshold, model in ((0.0, "small"), (2.0, "large")):
        policy = replace(LOGPROB, threshold=threshold)
        world.aliases["auto"] = Alias((("small", 1),), cascade=Cascade("large", policy))
        request = ask(call)
        assert isinstance(request.prompt, ChatPrompt)
        prompt = replace(request.prompt, tools=(Tool("weather", parameters='{"type": "object"}'),))
        answer = await world.ask(replace(request, prompt=prompt))
        assert answer.accepted.model == model
        calls = [call for delta in answer.deltas for call in delta.tool_calls]
        assert [call.name for call in calls if call.name] == ["weather"]
        assert "".join(call.arguments for call in calls) == '{"city": "Bern"}'
    await until(world.nothing_left)


async def test_both_models_follow_the_grammar(world: World) -> None:
    await start(world)
    grammar = Grammar(GrammarKind.REGEX, "v+")
    answer = await world.ask(ask(UNSURE, grammar=grammar))
    check(answer, UNSURE, "large")
    assert [w.starts[0].grammar for w in world.decodes] == [grammar, grammar]


async def test_the_answer_is_held_for_so_many_tokens_and_no_longer(world: World) -> None:
    await start(world)
    small = world.decodes[0]
    small.stepping.clear()
    small.last_position = LOGPROB.tokens - 1
    opening = asyncio.create_task(world.pipeline.open(ask(SURE)))
    await until(lambda: len(small.starts) == 1)
    assert not opening.done()
    small.stepping.set()
    stream = await opening
    # It has begun and not ended: the rest is streamed.
    assert stream.tried_tokens == 0 and small.holds()
    await stream.aclose()
    await until(world.nothing_left)


async def test_a_stream_that_is_to_be_resumed_is_refused(world: World) -> None:
    """Another router may find another of the two."""
    await start(world)
    with pytest.raises(InvalidArgument) as refused:
        await world.ask(ask(SURE, resumable=True))
    assert refused.value.field == "resumable" and asked(world) == (0, 0)


async def test_who_leaves_while_the_answer_is_held_leaves_nothing(world: World) -> None:
    await start(world)
    world.decodes[0].stepping.clear()
    opening = asyncio.create_task(world.pipeline.open(ask(UNSURE)))
    await until(lambda: len(world.decodes[0].starts) == 1)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await until(world.nothing_left)


async def test_the_small_model_answers_alone_where_the_large_one_does_not(world: World) -> None:
    told = replace(CONFIG, model=("small", "large"), wait_timeout_s=0.2)
    await start(world, config=told)
    await world.decodes[1].kill()
    await until(lambda: world.met()["decode"] == 1)
    check(await world.ask(ask(UNSURE)), UNSURE, "small")
    assert alone(world, "unavailable") == 1
    assert answered(world) == (1, 0)
    await until(world.nothing_left)


async def test_the_large_model_answers_where_the_small_one_is_gone(world: World) -> None:
    await start(world, config=replace(CONFIG, wait_timeout_s=0.2))
    await world.decodes[0].kill()
    await until(lambda: world.met()["decode"] == 1)
    answer = await world.ask(ask(SURE))
    assert (answer.accepted.model, answer.texts[0]) == ("large", SURE)
    await world.decodes[1].kill()
    await until(lambda: world.met()["decode"] == 0)
    with pytest.raises(Unavailable):
        await world.ask(ask(SURE))
    await until(world.nothing_left)


async def test_a_small_model_that_fails_while_it_is_held_is_no_failure(world: World) -> None:
    await start(world, config=replace(CONFIG, max_attempts=1))
    for worker in (world.prefills[0], world.decodes[0]):
        worker.refusals += [Internal("It fails."), Internal("It fails.")]
    check_text = await world.ask(ask(SURE))
    assert (check_text.accepted.model, check_text.texts[0]) == ("large", SURE)
    # With both gone wrong the client gets an error.
    workers: list[ScriptedWorker] = [*world.prefills, *world.decodes]
    for each in workers:
        each.refusals += [Internal("It fails."), Internal("It fails.")]
    with pytest.raises(BatonError):
        await world.ask(ask(SURE))
    await until(world.nothing_left)


async def test_a_prompt_that_is_too_long_for_the_small_model(world: World) -> None:
    await start(world)
    world.aliases["auto"] = Alias((("small", 1),), cascade=Cascade("large", LOGPROB))
    request = replace(ask(SURE), prompt=TextPrompt("x" * 5000))
    with pytest.raises(ContextLengthExceeded):
        await world.ask(request)
    assert asked(world) == (0, 0)
    await until(world.nothing_left)


async def test_ids_of_tokens_stay_with_their_tokenizer(world: World) -> None:
    await start(world, tokenizer="t2")
    for request in (
        replace(ask(UNSURE), prompt=TokenPrompt(tuple(b"hello"))),
        ask(UNSURE, stop_token_ids=(1,)),
    ):
        answer = await world.ask(request)
        assert answer.accepted.model == "small"
    check(await world.ask(ask(UNSURE)), UNSURE, "large")


EASY_OR_HARD = Policy(
    PolicyKind.CLASSIFIER, 0.5, bias=0.0, weights=tuple(float(i % 7 - 3) for i in range(64))
)


async def test_a_classifier_chooses_before_anything_is_asked(world: World) -> None:
    await start(world, EASY_OR_HARD)
    prompts = [TextPrompt(f"question {number} {says(SURE)}\n") for number in range(14)]
    easy = [EASY_OR_HARD.suffices(EASY_OR_HARD.of_prompt(prompt) or 0.0) for prompt in prompts]
    assert 1 < sum(easy) < 13
    for prompt, small in zip(prompts, easy, strict=True):
        answer = await world.ask(replace(ask(SURE), prompt=prompt))
        assert answer.accepted.model == ("small" if small else "large")
        assert answer.finished is not None and not answer.finished.tried_tokens
    assert asked(world) == (sum(easy), 14 - sum(easy))
    # Ids of tokens say nothing to it; and where the large model is gone, the small one answers.
    answer = await world.ask(replace(ask(SURE), prompt=TokenPrompt(tuple(b"hello"))))
    assert answer.accepted.model == "small"
    await until(world.nothing_left)
