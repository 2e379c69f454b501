"""An answer of a worker that cannot be read is a fault of that worker, not of the request: another
one is asked at once, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from batonlm.core.request.request import Request, TextPrompt
from batonlm.testing import language
from batonlm.testing.scripted import Context, ScriptedPrefill, ScriptedTokenizer
from batonlm.v1.prefill_pb2 import RunRequest, RunResponse
from batonlm.v1.tokenizer_pb2 import EncodeRequest, EncodeResponse
from tests.services.router.conftest import World, until


class GarbledPrefill(ScriptedPrefill):
    """Its answers are damaged by `damage`."""

    damage: Callable[[RunResponse], None]

    async def Run(self, request: RunRequest, context: Context) -> RunResponse:
        answer = await super().Run(request, context)
        self.damage(answer)
        return answer


def half_a_token(answer: RunResponse) -> None:
    answer.choices[0].token_ids += b"\0"


def a_logprob_too_many(answer: RunResponse) -> None:
    answer.choices[0].logprobs.add()
    answer.choices[0].logprobs.add()


def scores_that_do_not_fit(answer: RunResponse) -> None:
    answer.prompt_logprobs.num_top = 3
    answer.prompt_logprobs.own = bytes(4)


@pytest.mark.parametrize("damage", [half_a_token, a_logprob_too_many, scores_that_do_not_fit])
async def test_another_worker_computes_what_prefill_answered_badly(
    world: World, damage: Callable[[RunResponse], None]
) -> None:
    garbled = GarbledPrefill(world.network)
    garbled.damage = damage
    world.prefills.append(garbled)
    world.add(prefills=0)
    await world.run()
    async with asyncio.timeout(120):
        answer = await world.ask(Request(TextPrompt("abc"), seed=3, max_tokens=1))
    expected, _ = language.answer(b"abc", 3, 0, 1)
    assert tuple(answer.token_ids[0]) == expected
    assert len(garbled.runs) == 1
    await until(world.nothing_left)


class GarbledTokenizer(ScriptedTokenizer):
    """Its token ids end in half of one."""

    asked = 0

    async def Encode(self, request: EncodeRequest, context: Context) -> EncodeResponse:
        self.asked += 1
        answer = await super().Encode(request, context)
        answer.outputs[0].token_ids += b"\0\0"
        return answer


async def test_another_tokenizer_is_asked(world: World) -> None:
    garbled = [GarbledTokenizer(), GarbledTokenizer()]
    world.tokenizers += garbled
    await world.start()
    asked = 0
    async with asyncio.timeout(120):
        # Which tokenizer a request begins with is drawn.
        while asked < 8 or not any(one.asked for one in garbled):
            answer = await world.ask(Request(TextPrompt("abc"), seed=3, max_tokens=1))
            assert answer.accepted.prompt_tokens == 3
            asked += 1
    await until(world.nothing_left)
