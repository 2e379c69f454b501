"""The request state of requests that nothing disturbs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.errors import (
    Unavailable,
)
from batonlm.core.handover.fit import short_name
from batonlm.core.request.request import (
    ChatPrompt,
    Delta,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from batonlm.router.config import RouterConfig
from batonlm.router.request.runner import MAX_UNCONFIRMED
from batonlm.testing import language
from tests.services.router.conftest import PATIENCE_S, World, until

PROMPT = "once upon a time"
IDS = tuple(PROMPT.encode())
REQUEST = Request(TextPrompt(PROMPT), seed=7, max_tokens=40, ignore_eos=True)
EXPECTED, _ = language.answer(IDS, 7, 0, 40, ignore_eos=True)
TEXT = language.text_of(EXPECTED)


async def test_an_answer_is_the_models_own(world: World) -> None:
    await world.start()
    answer = await world.ask(REQUEST)
    assert tuple(answer.token_ids[0]) == EXPECTED
    assert answer.texts[0] == TEXT
    assert answer.reason() is FinishReason.LENGTH
    assert answer.accepted.prompt_tokens == len(IDS)
    assert answer.accepted.prompt_token_ids == ()
    assert answer.finished is not None
    assert answer.finished.completion_tokens == 40
    assert answer.finished.cached_tokens == 1
    assert len(world.prefills[0].runs) == 1
    await until(world.nothing_left)


async def test_a_busy_router_sends_tokens_together_but_neither_end_of_an_answer_waits(
    world: World,
) -> None:
    await world.start()
    world.pipeline.services.load.interval_s = 1e6
    stream = await world.pipeline.open(REQUEST)
    try:
        async with asyncio.timeout(PATIENCE_S):
            deltas = [event async for event in stream if isinstance(event, Delta)]
    finally:
        await stream.aclose()
    assert len(deltas) <= 2
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    await until(world.nothing_left)


@pytest.mark.parametrize(
    "prompt",
    [
        TokenPrompt(IDS),
        ChatPrompt((Message("user", "hello"),)),
    ],
)
async def test_every_kind_of_prompt(world: World, prompt: TokenPrompt | ChatPrompt) -> None:
    await world.start()
    answer = await world.ask(replace(REQUEST, prompt=prompt, return_token_ids=True))
    ids = answer.accepted.prompt_token_ids
    assert ids == (IDS if isinstance(prompt, TokenPrompt) else tuple(b"user:hello\n"))
    assert tuple(answer.token_ids[0]) == language.answer(ids, 7, 0, 40, ignore_eos=True)[0]


async def test_choices_differ_and_share_one_prefill(world: World) -> None:
    await world.start()
    answer = await world.ask(replace(REQUEST, n=4, ignore_eos=False))
    for choice in range(4):
        expected, reason = language.answer(IDS, 7, choice, 40)
        assert tuple(answer.token_ids[choice]) == expected
        assert answer.texts[choice] == language.text_of(expected)
        assert answer.reason(choice) is reason
        assert answer.last[choice].stop_token_id is None, "nobody asked for it"
    assert [run.choices for run in world.prefills[0].runs] == [(0, 1, 2, 3)]
    await until(world.nothing_left)


async def test_a_named_stop_token_is_reported(world: World) -> None:
    await world.start()
    stop = EXPECTED[5]
    answer = await world.ask(replace(REQUEST, stop_token_ids=(stop,)))
    first = EXPECTED.index(stop)
    assert tuple(answer.token_ids[0]) == EXPECTED[: first + 1]
    assert answer.reason() is FinishReason.STOP
    assert answer.last[0].stop_token_id == stop


async def test_one_token_needs_no_decode_worker(world: World) -> None:
    await world.start()
    answer = await world.ask(replace(REQUEST, max_tokens=1, n=3))
    assert [answer.token_ids[c] for c in range(3)] == [
        list(language.answer(IDS, 7, c, 1, ignore_eos=True)[0]) for c in range(3)
    ]
    assert world.decodes[0].starts == []
    assert world.network.given == {}
    await until(world.nothing_left)


async def test_nothing_is_moved_when_token_0_ends_all(world: World) -> None:
    """The decode worker is started at once all the same, and is told to forget it."""
    await world.start()
    world.decodes[0].collecting.clear()
    seed = next(s for s in range(9999) if language.answer(IDS, s, 0, 1)[0] == (language.EOS,))
    answer = await world.ask(replace(REQUEST, seed=seed, ignore_eos=False))
    assert answer.token_ids[0] == [language.EOS]
    assert answer.texts[0] == ""
    assert answer.reason() is FinishReason.STOP
    assert world.decodes[0].starts
    await until(world.nothing_left)


async def test_short_prompts_are_prefilled_on_decode(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=len(IDS)))
    short = await world.ask(REQUEST)
    assert tuple(short.token_ids[0]) == EXPECTED
    assert world.prefills[0].runs == []
    assert short.finished is not None
    assert short.finished.cached_tokens == 2, "decode's own report"
    await world.ask(replace(REQUEST, prompt=TextPrompt(PROMPT + "!")))
    assert len(world.prefills[0].runs) == 1


async def test_without_prefill_workers_decode_prefills(world: World) -> None:
    await world.start(prefills=0)
    assert tuple((await world.ask(REQUEST)).token_ids[0]) == EXPECTED


async def test_a_prefill_worker_that_does_not_fit_is_not_used(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says once which two and why."""
    prefill = world.new_prefill()
    prefill.layout = replace(language.LAYOUT, dtype="bfloat16")
    world.prefills.append(prefill)
    await world.start(prefills=0)
    for _ in range(2):
        assert tuple((await world.ask(REQUEST)).token_ids[0]) == EXPECTED
    assert prefill.runs == []
    names = f"{short_name(prefill.identity)} and {short_name(world.decodes[0].identity)}"
    told = [record.getMessage() for record in caplog.records if "not fit" in record.getMessage()]
    assert told == [
        f"KV does not fit between {names}: dtype: bfloat16 against float32 (they are not paired)"
    ]


async def test_token_0_reaches_the_client_before_decode_has_anything(world: World) -> None:
    await world.start()
    world.decodes[0].stepping.clear()
    world.decodes[0].tamper = lambda tokens: ()
    stream = await world.pipeline.open(REQUEST)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await anext(stream)
            first = await anext(stream)
        assert tuple(first.token_ids) == EXPECTED[:1]  # type: ignore[union-attr]
    finally:
        await stream.aclose()


async def test_decode_may_be_first_with_token_0(world: World) -> None:
    await world.start()
    world.prefills[0].answering.clear()
    answer = await world.ask(REQUEST)
    assert tuple(answer.token_ids[0]) == EXPECTED
    world.prefills[0].answering.set()
    await until(world.nothing_left)


async def test_duplicates_are_dropped(world: World) -> None:
    await world.start()
    seen: list[Any] = []

    def everything_again(tokens: list[Any]) -> list[Any]:
        seen.extend(tokens)
        return [*seen[-3:], *tokens, *tokens]

    world.decodes[0].tamper = everything_again
    answer = await world.ask(replace(REQUEST, n=2))
    for choice in range(2):
        expected, _ = language.answer(IDS, 7, choice, 40, ignore_eos=True)
        assert tuple(answer.token_ids[choice]) == expected


async def test_a_seed_is_drawn_and_told(world: World) -> None:
    await world.start()
    first = await world.ask(replace(REQUEST, seed=None))
    second = await world.ask(replace(REQUEST, seed=None))
    assert first.accepted.seed != second.accepted.seed
    again = await world.ask(replace(REQUEST, seed=first.accepted.seed))
    assert again.token_ids == first.token_ids


async def test_log_probabilities_come_with_texts(world: World) -> None:
    await world.start()
    answer = await world.ask(replace(REQUEST, sampling=SamplingParams(top_logprobs=2)))
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert [entry.token.token_id for entry in entries] == list(EXPECTED)
    for entry in entries:
        token = entry.token.token_id
        assert entry.token.text == bytes([token])
        assert entry.token.logprob == pytest.approx(language.logprob(token))
        assert [top.token_id for top in entry.top] == [token, 97]
        assert entry.top[1].text == b"a"


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_text_tokens_usage_and_logprobs(
    world: World, include: bool
) -> None:
    await world.start()
    stop = TEXT[17:20]
    kept, text = language.stopped(EXPECTED, stop) or ((), "")
    answer = await world.ask(
        replace(
            REQUEST,
            stop_strings=("never there", stop),
            include_stop_string=include,
            sampling=SamplingParams(top_logprobs=0),
        )
    )
    assert tuple(answer.token_ids[0]) == kept
    assert answer.texts[0] == text + (stop if include else "")
    assert sum(len(delta.logprobs) for delta in answer.deltas) == len(kept)
    assert answer.reason() is FinishReason.STOP
    assert answer.last[0].stop_string == stop
    assert answer.finished is not None
    assert answer.finished.completion_tokens == len(kept)
    await until(world.nothing_left)


async def test_decode_runs_no_further_ahead_of_text_than_allowed(world: World) -> None:
    await world.start()
    world.detokenizers[0].talking.clear()
    stop = TEXT[30:34]
    kept, _ = language.stopped(EXPECTED, stop) or ((), "")
    asking = asyncio.create_task(world.ask(replace(REQUEST, stop_strings=(stop,))))
    await until(lambda: world.decodes[0].furthest_ahead == MAX_UNCONFIRMED)
    world.detokenizers[0].talking.set()
    assert tuple((await asking).token_ids[0]) == kept
    assert world.decodes[0].furthest_ahead == MAX_UNCONFIRMED


async def test_one_choice_stops_and_the_others_go_on(world: World) -> None:
    await world.start()
    answers = [language.answer(IDS, 7, c, 40, ignore_eos=True)[0] for c in range(3)]
    texts = [language.text_of(ids) for ids in answers]
    stop = next(
        texts[0][i : i + 3]
        for i in range(10, 30)
        if not any(texts[0][i : i + 3] in other for other in texts[1:])
    )
    answer = await world.ask(replace(REQUEST, n=3, stop_strings=(stop,)))
    kept, text = language.stopped(answers[0], stop) or ((), "")
    assert tuple(answer.token_ids[0]) == kept
    assert answer.texts[0] == text
    for choice in (1, 2):
        assert tuple(answer.token_ids[choice]) == answers[choice]
        assert answer.reason(choice) is FinishReason.LENGTH
    assert any(choices == (0,) for _, choices in world.decodes[0].cancels)


async def test_draining_takes_nothing_new_and_waits_for_the_rest(world: World) -> None:
    await world.start()
    world.decodes[0].stepping.clear()
    stream = await world.pipeline.open(REQUEST)
    draining = asyncio.create_task(world.pipeline.drain())
    await until(lambda: not world.pipeline.ready())
    with pytest.raises(Unavailable):
        await world.pipeline.open(REQUEST)
    assert not draining.done()
    world.decodes[0].stepping.set()
    events = [event async for event in stream]
    await draining
    assert sum(len(getattr(event, "token_ids", ())) for event in events) == 40
    await stream.aclose()


async def test_models_and_readiness_follow_the_workers(world: World) -> None:
    await world.start()
    assert world.pipeline.models() == [language.MODEL]
    assert world.pipeline.ready()
    await world.decodes[0].kill()
    await until(lambda: not world.pipeline.ready())
    assert world.pipeline.models() == []
