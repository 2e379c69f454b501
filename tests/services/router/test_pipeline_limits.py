"""What ends a request early, what keeps one out, and readers that are slow."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from batonlm.core.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from batonlm.core.request.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from batonlm.router.config import RouterConfig
from batonlm.router.request.texts import MAX_DELTA_TOKENS
from batonlm.testing import language
from tests.services.router.conftest import World, until

PROMPT = "once upon a time"
IDS = tuple(PROMPT.encode())
REQUEST = Request(TextPrompt(PROMPT), seed=7, max_tokens=40, ignore_eos=True)


async def test_a_client_that_leaves_frees_everything(world: World) -> None:
    await world.start()
    stream = await world.pipeline.open(replace(REQUEST, n=4, max_tokens=3000))
    await anext(stream)
    await anext(stream)
    assert world.decodes[0].holds()
    await stream.aclose()
    await until(world.nothing_left)


async def test_a_client_that_leaves_before_decode_began_frees_prefill_too(world: World) -> None:
    await world.start()
    world.prefills[0].computing.clear()
    stream = await world.pipeline.open(REQUEST)
    await until(lambda: len(world.decodes[0].holds()) == 1 and world.prefills[0].running == 1)
    await stream.aclose()
    await until(lambda: world.prefills[0].cancelled == [world.prefills[0].runs[0].key])
    await until(world.nothing_left)


async def test_out_of_time_in_the_middle(world: World) -> None:
    await world.start()
    world.decodes[0].stepping.clear()
    with pytest.raises(DeadlineExceeded):
        await world.ask(replace(REQUEST, deadline_s=0.2))
    await until(world.nothing_left)


async def test_time_left_is_passed_on(world: World) -> None:
    await world.start()
    await world.ask(replace(REQUEST, deadline_s=50.0))
    remaining = [world.prefills[0].runs[0].remaining_s, world.decodes[0].starts[0].remaining_s]
    assert all(left is not None and 0 < left <= 50 for left in remaining)


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (replace(REQUEST, model="other"), ModelNotFound, "model"),
        (replace(REQUEST, max_tokens=language.LONGEST), ContextLengthExceeded, "max_tokens"),
        (replace(REQUEST, prompt=TextPrompt("x" * language.LONGEST)), ContextLengthExceeded, None),
        (replace(REQUEST, stop_token_ids=(language.VOCAB,)), InvalidArgument, "stop_token_ids"),
        (
            replace(REQUEST, sampling=SamplingParams(logit_bias=((language.VOCAB, 1.0),))),
            InvalidArgument,
            "logit_bias",
        ),
        (replace(REQUEST, prompt=TokenPrompt((language.VOCAB,))), InvalidArgument, "prompt"),
        (replace(REQUEST, n=0), InvalidArgument, "n"),
        (
            replace(REQUEST, max_tokens=None, min_tokens=language.LONGEST),
            InvalidArgument,
            "min_tokens",
        ),
    ],
)
async def test_bad_requests_start_nothing(
    world: World, request_: Request, kind: type[BatonError], field: str | None
) -> None:
    await world.start()
    with pytest.raises(kind) as caught:
        await world.pipeline.open(request_)
    assert field is None or caught.value.field == field
    assert world.pipeline.num_requests == 0
    assert world.decodes[0].starts == world.prefills[0].runs == []


async def test_no_limit_means_up_to_the_models_context(world: World) -> None:
    await world.start()
    prompt = TokenPrompt(tuple(b"a" * (language.LONGEST - 30)))
    answer = await world.ask(replace(REQUEST, prompt=prompt, max_tokens=None))
    assert len(answer.token_ids[0]) == 30
    assert answer.reason() is FinishReason.LENGTH


async def test_more_requests_than_allowed_are_refused(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=0, max_requests=2))
    world.decodes[0].stepping.clear()
    streams = [await world.pipeline.open(REQUEST) for _ in range(2)]
    with pytest.raises(Overloaded) as caught:
        await world.pipeline.open(REQUEST)
    assert caught.value.retry_after_s
    await streams[0].aclose()
    third = await world.pipeline.open(REQUEST)
    for stream in (streams[1], third):
        await stream.aclose()
    await until(world.nothing_left)


async def test_a_slow_reader_gets_all_in_few_deltas(world: World) -> None:
    await world.start()
    stream = await world.pipeline.open(REQUEST)
    await anext(stream)
    await until(lambda: world.pipeline.num_requests == 0)
    rest = [event async for event in stream]
    assert sum(len(getattr(event, "token_ids", ())) for event in rest) == 40
    assert len(rest) <= 3
    await stream.aclose()


@pytest.mark.deep
async def test_a_reader_that_is_far_behind_catches_up_in_pieces(world: World) -> None:
    """No piece grows with what was missed, whatever comes with the tokens."""
    await world.start()
    wanted = replace(REQUEST, max_tokens=1000, sampling=SamplingParams(top_logprobs=2))
    stream = await world.pipeline.open(wanted)
    await anext(stream)
    await until(lambda: world.pipeline.num_requests == 0)
    deltas = [event for event in [e async for e in stream] if isinstance(event, Delta)]
    expected, _ = language.answer(IDS, 7, 0, 1000, ignore_eos=True)
    assert tuple(token for delta in deltas for token in delta.token_ids) == expected
    assert "".join(delta.text for delta in deltas) == language.text_of(expected)
    assert [e.token.token_id for delta in deltas for e in delta.logprobs] == list(expected)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_TOKENS
    await stream.aclose()


@pytest.mark.parametrize("role", ("tokenizer", "decode", "detokenizer"))
async def test_a_role_without_any_worker_is_named_at_once(world: World, role: str) -> None:
    counts = {"tokenizers": 1, "decodes": 1, "detokenizers": 1, f"{role}s": 0}
    await world.start(RouterConfig(local_prefill_tokens=0, wait_timeout_s=60.0), **counts)
    world.listed[role].lists = False
    async with asyncio.timeout(120):
        with pytest.raises(Unavailable, match=f"no {role} worker, and none is configured"):
            await world.ask(replace(REQUEST, prompt=TextPrompt("Hello.")))
    await until(world.nothing_left)


async def test_an_alias_stands_for_the_model(world: World) -> None:
    name = language.MODEL.name
    await world.start(
        RouterConfig(local_prefill_tokens=0, model=(name,), model_aliases=("gpt-4o",))
    )
    await world.ask(replace(REQUEST, model="gpt-4o"))
    with pytest.raises(ModelNotFound, match=f"it serves 'gpt-4o', '{name}'"):
        await world.ask(replace(REQUEST, model="gpt-5"))
    with pytest.raises(InvalidArgument):
        RouterConfig(model_aliases=("gpt-4o",))


async def test_an_unknown_model_is_named_with_those_served(world: World) -> None:
    await world.start()
    with pytest.raises(ModelNotFound) as caught:
        await world.ask(replace(REQUEST, model="other"))
    served = world.pipeline.models()[0].name
    assert caught.value.message == f"This server has no model 'other': it serves {served!r}."
