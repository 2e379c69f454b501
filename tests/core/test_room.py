"""How much output a request gets of the room that its prompt leaves in the model's context."""

from __future__ import annotations

import pytest

from batonlm.core.errors import ContextLengthExceeded
from batonlm.core.request.first_attempt import resolve_stop
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import Request, TextPrompt

MODEL = ModelDescription("m", "d", max_model_len=100, vocab_size=10, eos_token_ids=(1,))


def longest(num_prompt: int, max_tokens: int | None, *, cap: bool = False) -> int:
    request = Request(TextPrompt("x"), max_tokens=max_tokens, cap_max_tokens=cap)
    return resolve_stop(request, num_prompt, MODEL).max_tokens


def test_the_room_is_the_longest_output() -> None:
    assert longest(60, None) == longest(60, 40) == 40
    assert longest(60, 7) == longest(60, 7, cap=True) == 7
    assert longest(60, 41, cap=True) == longest(60, 2**31 - 1, cap=True) == 40
    assert longest(99, 5, cap=True) == 1


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "cap", "field"),
    [
        (60, 41, False, "max_tokens"),
        (100, 1, False, "prompt"),
        (100, 1, True, "prompt"),
        (100, None, False, "prompt"),
    ],
)
def test_what_does_not_fit_is_an_error(
    num_prompt: int, max_tokens: int | None, cap: bool, field: str
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        longest(num_prompt, max_tokens, cap=cap)
    assert caught.value.field == field
