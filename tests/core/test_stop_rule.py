"""StopRule: every end, and what must not be drawn before it is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonlm.core.request.request import FinishReason, Grammar, StopParams
from batonlm.core.scheduler.sequence import StopRule
from tests.core.attempts import attempt
from tests.core.grammars import ANY

EOS = (2, 3)


def rule(max_model_len: int = 100, *, grammar: Grammar | None = None, **stop: Any) -> StopRule:
    """Over a prompt of 10 tokens and, if nothing else is said, at most 5 more."""
    params = StopParams(**{"max_tokens": 5, **stop})
    asked = replace(attempt(size=10), stop=params, grammar=grammar)
    return StopRule(asked, EOS, max_model_len)


@pytest.mark.parametrize(
    ("stop", "position", "token", "end"),
    [
        ({}, 0, 7, (None, None)),
        ({}, 0, 2, (FinishReason.STOP, 2)),
        ({}, 0, 3, (FinishReason.STOP, 3)),
        ({"ignore_eos": True}, 0, 2, (None, None)),
        ({"stop_token_ids": (7,)}, 1, 7, (FinishReason.STOP, 7)),
        ({"stop_token_ids": (7,), "ignore_eos": True}, 1, 7, (FinishReason.STOP, 7)),
        ({}, 3, 7, (None, None)),
        ({}, 4, 7, (FinishReason.LENGTH, None)),
        ({}, 4, 2, (FinishReason.STOP, 2)),
        ({"max_tokens": 50, "max_model_len": 12}, 0, 7, (None, None)),
        ({"max_tokens": 50, "max_model_len": 12}, 1, 7, (FinishReason.LENGTH, None)),
    ],
)
def test_ends(
    stop: dict[str, Any],
    position: int,
    token: int,
    end: tuple[FinishReason | None, int | None],
) -> None:
    assert rule(**stop).ends(position, token) == end


def test_end_tokens_are_banned_before_min_tokens() -> None:
    one = rule(min_tokens=2, stop_token_ids=(7, 3))
    assert one.banned(0) == one.banned(1) == (2, 3, 7)
    assert one.banned(2) == ()
    assert rule(min_tokens=2, ignore_eos=True).banned(0) == ()


def test_end_tokens_always_end_what_follows_a_grammar() -> None:
    """Ignored ones are banned instead, which holds until nothing else can be drawn."""
    one = rule(grammar=ANY, ignore_eos=True, min_tokens=2, stop_token_ids=(3, 7))
    assert one.ends(0, 2) == (FinishReason.STOP, 2)
    assert set(one.banned(1)) == {2, 3, 7}
    assert one.banned(2) == (2,)
    assert rule(grammar=ANY).banned(0) == ()


def test_the_most_positions_a_choice_can_have() -> None:
    assert rule(max_tokens=5).max_positions == 15
    assert rule(12, max_tokens=5).max_positions == 12
