"""The journey of a choice that its decode worker gives away, with its KV."""

from __future__ import annotations

from baton.core.attempt import ChoiceTokens, SequenceKey
from baton.core.attempt_states import AttemptState, Leg
from baton.core.errors import InvalidArgument
from baton.core.journey import AttemptRun, Journey
from baton.core.request import SamplingParams, StopParams

PROMPT = (1, 2, 3)
BOTH = (Leg.PREFILL, Leg.DECODE)


def decoding(n: int = 1, tokens: tuple[int, ...] = (10, 11)) -> tuple[Journey, AttemptRun]:
    """All choices decode and have said the same tokens."""
    journey = Journey(
        "r",
        PROMPT,
        n=n,
        sampling=SamplingParams(seed=5),
        stop=StopParams(max_tokens=100),
        max_barren=3,
    )
    (run,) = journey.next_attempts()
    journey.placed(0, BOTH)
    journey.kv_complete(0)
    for choice in range(n):
        journey.tokens(Leg.DECODE, ChoiceTokens(SequenceKey("r", choice, 0), 0, tokens))
    return journey, run


def test_a_choice_that_is_given_away_goes_on_before_its_newest_token() -> None:
    journey, run = decoding(n=2)
    assert journey.given_away(0, 1, 2)
    assert run.running == {0} and not run.over
    (moved,) = journey.next_attempts()
    states = [moved.state]
    assert moved.moved
    assert (moved.attempt.choices, moved.attempt.token_ids) == ((1,), (*PROMPT, 10))
    journey.placed(1, {Leg.DECODE})
    states.append(moved.state)
    journey.tokens(Leg.DECODE, ChoiceTokens(SequenceKey("r", 1, 0), 2, (66,)))
    journey.tokens(Leg.DECODE, ChoiceTokens(SequenceKey("r", 1, 1), 1, (11, 12)))
    assert journey.logs[1].token_ids() == (10, 11, 12)
    journey.kv_complete(1)
    states.append(moved.state)
    assert states == [AttemptState.PLACING, AttemptState.MOVING, AttemptState.DECODING]
    assert journey.given_away(0, 0, 2)
    assert run.state is AttemptState.ENDED
    assert Leg.DECODE not in run.to_cancel, "it frees what it gave away by itself"


def test_a_move_that_fails_counts_for_nothing() -> None:
    journey, _ = decoding()
    for number in range(1, 20, 2):
        (before,) = [r for r in journey._runs.values()]
        assert journey.given_away(before.attempt.attempt, 0, 2)
        (moved,) = journey.next_attempts()
        journey.placed(number, {Leg.DECODE})
        journey.leg_failed(number, Leg.DECODE, InvalidArgument("too long for that worker"))
        assert moved.state is AttemptState.FAILED and journey.failure is None
        (again,) = journey.next_attempts()
        assert not again.moved
        assert again.attempt.token_ids == (*PROMPT, 10, 11)
        journey.placed(number + 1, BOTH)
        journey.kv_complete(number + 1)


def test_giving_away_what_has_ended_or_is_incomplete() -> None:
    journey, run = decoding(n=2)
    journey.stopped(0, 1, "x")
    assert not journey.given_away(0, 0, 2)
    assert journey.next_attempts() == []
    assert not journey.given_away(0, 1, 3), "a token is missing"
    assert run.state is AttemptState.FAILED
    (again,) = journey.next_attempts()
    assert not again.moved
