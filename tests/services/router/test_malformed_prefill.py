"""A prefill worker's answer that cannot be read is a fault of that worker: the request goes on
elsewhere at once, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.core.request.request import Request, TextPrompt
from baton.testing import language
from baton.testing.scripted import Context, ScriptedPrefill
from baton.v1.prefill_pb2 import RunRequest, RunResponse
from tests.services.router.conftest import World, until


class Garbled(ScriptedPrefill):
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
async def test_a_request_survives_an_answer_that_cannot_be_read(
    world: World, damage: Callable[[RunResponse], None]
) -> None:
    garbled = Garbled(world.network)
    garbled.damage = damage
    world.prefills.append(garbled)
    world.add(prefills=0)
    await world.run()
    async with asyncio.timeout(5):
        answer = await world.ask(Request(TextPrompt("abc"), seed=3, max_tokens=1))
    expected, _ = language.answer(b"abc", 3, 0, 1)
    assert tuple(answer.token_ids[0]) == expected
    assert len(garbled.runs) == 1
    await until(world.nothing_left)
