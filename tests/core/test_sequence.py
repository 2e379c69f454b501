"""Sequence: its table of transitions, and the tokens it accepts."""

from __future__ import annotations

from typing import Any

import pytest

from batonlm.core.errors import Internal
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.request import FinishReason, SamplingParams
from batonlm.core.scheduler.sequence import (
    TERMINAL,
    TRANSITIONS,
    Sequence,
    SequenceEvent,
    SequenceState,
    StopRule,
)
from tests.core.attempts import EOS, MAX_MODEL_LEN, attempt

S, E = SequenceState, SequenceEvent

PATHS = {
    S.QUEUED: [],
    S.PREFILLING: [E.START],
    S.ARRIVING: [E.RESERVE],
    S.RUNNING: [E.START, E.READY],
    S.SWAPPED: [E.START, E.READY, E.SWAP],
    S.HELD: [E.START, E.HOLD],
    S.FINISHED: [E.START, E.FINISH],
    S.CANCELLED: [E.CANCEL],
    S.FAILED: [E.FAIL],
}


def sequence(max_unconfirmed: int = 0, **kwargs: Any) -> Sequence:
    one = attempt(**kwargs)
    return Sequence(1, one, 0, StopRule(one, (EOS,), MAX_MODEL_LEN), max_unconfirmed)


def reached(state: SequenceState) -> Sequence:
    one = sequence()
    for event in PATHS[state]:
        one.move(event)
    return one


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("event", list(E))
def test_every_pair_moves_as_the_table_says_or_raises(
    state: SequenceState, event: SequenceEvent
) -> None:
    one = reached(state)
    assert one.state is state
    if (state, event) in TRANSITIONS:
        one.move(event)
        assert one.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(Internal):
            one.move(event)
        assert one.state is state


def test_the_table_is_complete() -> None:
    sources = {state for state, _ in TRANSITIONS}
    assert sources == set(S) - TERMINAL, "only the ends are left by nothing"
    assert {event for _, event in TRANSITIONS} == set(E)
    assert {*TRANSITIONS.values(), S.QUEUED} == set(S), "every state can be reached"
    for state in sources:
        assert TRANSITIONS[state, E.CANCEL] is S.CANCELLED, "cancel works at any point"


def test_tokens_continue_the_attempts_positions() -> None:
    one = sequence(size=5, accepted=(50, 51), max_tokens=4)
    assert one.position == 2
    made = one.accept(60, Logprobs(-1.0))
    assert (made.position, made.token_ids, made.finish_reason) == (2, (60,), None)
    assert made.logprobs == (Logprobs(-1.0),)
    made = one.accept(61, Logprobs(-2.0))
    assert (made.position, made.finish_reason) == (3, FinishReason.LENGTH)
    assert one.attempt.token_ids[-1] == 51, "the attempt's own tokens stay as they are"
    since = one.tokens_from(3)
    assert since is not None
    assert (since.token_ids, since.logprobs) == ((61,), (Logprobs(-2.0),))
    whole, after = one.tokens_from(2), one.tokens_from(4)
    assert whole is not None and whole.token_ids == (60, 61)
    assert after is not None and after.token_ids == ()
    assert one.tokens_from(1) is None and one.tokens_from(5) is None


def test_history_is_given_only_when_it_is_needed() -> None:
    assert sequence().sample_row().history == ()
    one = sequence(size=5, sampling=SamplingParams(presence_penalty=0.5))
    one.accept(60, None)
    row = one.sample_row()
    assert tuple(row.history) == (*one.attempt.token_ids, 60)
    assert (row.num_prompt_tokens, row.position) == (5, 1)


def test_it_must_wait_when_it_is_as_far_ahead_as_it_may_be() -> None:
    one = sequence(max_unconfirmed=2, size=5)
    one.accept(60, None)
    assert not one.must_wait
    one.accept(61, None)
    assert one.must_wait
    one.confirm(1)
    assert not one.must_wait
