"""A prompt's own log-probabilities come with the first event, whoever dies of computing them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.request.first_attempt import check_size
from batonlm.core.request.prompt_logprobs import MAX_BYTES
from batonlm.core.request.request import (
    FinishReason,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from batonlm.router.config import RouterConfig
from batonlm.testing import language
from tests.services.router.conftest import Answer, World, read, until

TEXT = "The words of this prompt are known, and how likely each of them is."
IDS = tuple(TEXT.encode())
REQUEST = Request(
    prompt=TextPrompt(TEXT),
    sampling=SamplingParams(temperature=0.0),
    seed=5,
    max_tokens=20,
    ignore_eos=True,
    prompt_logprobs=2,
)
EXPECTED = language.answer(IDS, 5, 0, 20, ignore_eos=True)[0]


def check(answer: Answer, num_top: int = 2) -> None:
    told = answer.accepted.prompt_logprobs
    assert [entry.token.text for entry in told] == [bytes([token]) for token in IDS]
    assert [entry.token.logprob for entry in told[1:]] == [language.logprob(t) for t in IDS[1:]]
    best = [(97 + i, bytes([97 + i]), language.logprob(97 + i)) for i in range(num_top)]
    for entry in told[1:]:
        assert [(top.token_id, top.text, top.logprob) for top in entry.top] == best


@pytest.mark.parametrize("prefills", [1, 0])
async def test_the_prompt_is_scored_and_the_answer_is_what_it_is(
    world: World, prefills: int
) -> None:
    await world.start(prefills=prefills)
    answer = await read(await world.pipeline.open(REQUEST))
    check(answer)
    assert tuple(answer.token_ids[0]) == EXPECTED
    assert answer.finished is not None
    assert answer.finished.prompt_tokens == len(IDS)
    runs = [run for w in world.prefills for run in w.runs]
    runs += [start for w in world.decodes for start in w.starts]
    scored = [run for run in runs if run.prompt_logprobs is not None]
    assert len(scored) == 1
    assert scored[0].stop.max_tokens == 1
    await until(world.nothing_left)


async def test_nothing_is_generated_when_nothing_is_asked(world: World) -> None:
    await world.start()
    asked = replace(REQUEST, max_tokens=0, n=2, echo=True, prompt_logprobs=0)
    answer = await read(await world.pipeline.open(asked))
    check(answer, 0)
    assert answer.accepted.prompt_text == TEXT
    assert answer.reason(0) is answer.reason(1) is FinishReason.LENGTH
    assert answer.finished is not None and answer.finished.completion_tokens == 0
    assert world.pipeline.num_requests == 0
    await until(world.nothing_left)
    assert world.counted("baton_time_to_first_token_seconds_count") == 0
    assert world.counted("baton_requests_total", outcome="finished") == 1


async def test_an_echo_of_ids_is_their_text(world: World) -> None:
    await world.start()
    asked = replace(REQUEST, prompt=TokenPrompt(IDS), max_tokens=0, echo=True)
    answer = await read(await world.pipeline.open(asked))
    assert answer.accepted.prompt_text == TEXT
    check(answer)


async def test_a_prompt_of_one_token_has_no_numbers(world: World) -> None:
    await world.start()
    answer = await read(await world.pipeline.open(replace(REQUEST, prompt=TokenPrompt((65,)))))
    (only,) = answer.accepted.prompt_logprobs
    assert only.token.text == b"A" and only.top == ()


async def test_a_worker_that_dies_of_it_is_followed_by_another(world: World) -> None:
    await world.start(prefills=2)
    for worker in world.prefills:
        worker.refusals.append(Unavailable("lost on purpose"))
    check(await read(await world.pipeline.open(REQUEST)))
    await until(world.nothing_left)


async def test_numbers_that_are_lost_are_an_error_to_try_again(world: World) -> None:
    await world.start(prefills=0)
    world.decodes[0].scoring = False
    with pytest.raises(Unavailable) as caught:
        await world.pipeline.open(REQUEST)
    assert caught.value.retry_after_s
    assert world.pipeline.num_requests == 0
    await until(world.nothing_left)


@pytest.mark.deep
async def test_the_detokenizer_that_spells_is_replaced(world: World) -> None:
    await world.start(detokenizers=2)
    for worker in world.detokenizers:
        worker.fail_next.append(Unavailable("lost on purpose"))
    check(await read(await world.pipeline.open(replace(REQUEST, max_tokens=1))))
    await until(world.nothing_left)


@pytest.mark.deep
async def test_a_detokenizer_that_always_fails_is_not_asked_for_ever(world: World) -> None:
    await world.start(RouterConfig(max_attempts=2))
    world.detokenizers[0].fail_next += [Unavailable("lost on purpose")] * 50
    with pytest.raises(Unavailable):
        await world.pipeline.open(REQUEST)
    assert world.pipeline.num_requests == 0


def test_what_is_told_of_one_prompt_is_bounded() -> None:
    most = MAX_BYTES // (4 * (1 + 2 * 2))
    check_size(REQUEST, most)
    with pytest.raises(InvalidArgument) as caught:
        check_size(REQUEST, most + 1)
    assert caught.value.field == "prompt_logprobs"
    check_size(replace(REQUEST, prompt_logprobs=None), 10 * most)


@pytest.mark.parametrize(
    ("most", "side", "kept"),
    [(10, "left", IDS[-10:]), (10, "right", IDS[:10]), (1000, "left", IDS), (-1, "left", IDS)],
)
async def test_a_prompt_is_cut_where_that_is_asked(
    world: World, most: int, side: str, kept: tuple[int, ...]
) -> None:
    await world.start()
    asked = replace(
        REQUEST,
        prompt_logprobs=None,
        truncate_prompt_tokens=most,
        truncation_side=side,
        echo=True,
        return_token_ids=True,
    )
    answer = await read(await world.pipeline.open(asked))
    assert answer.accepted.prompt_token_ids == kept
    assert answer.accepted.prompt_text == bytes(kept).decode()
    assert tuple(answer.token_ids[0]) == language.answer(kept, 5, 0, 20, ignore_eos=True)[0]


async def test_tokens_and_texts(world: World) -> None:
    await world.start()
    names: list[str] = []
    encoded, model = await world.pipeline.tokenize(REQUEST, on_names=names.extend)
    assert (encoded.token_ids, "".join(names)) == (IDS, TEXT)
    assert model.name == language.MODEL.name
    assert await world.pipeline.detokenize(replace(REQUEST, prompt=TokenPrompt(IDS))) == TEXT
    with pytest.raises(InvalidArgument) as caught:
        await world.pipeline.detokenize(replace(REQUEST, prompt=TokenPrompt((9999,))))
    assert caught.value.field == "tokens"
