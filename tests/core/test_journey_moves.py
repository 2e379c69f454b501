"""The request state of a choice that its decode worker gives away, with its KV."""

from __future__ import annotations

from batonlm.core.errors import HandoverFailed, InvalidArgument, Unavailable
from batonlm.core.request.attempt import Attempt, AttemptState, ChoiceTokens, Phase, SequenceKey
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.request.request_state import AttemptRun, RequestState

PROMPT = (1, 2, 3)
BOTH = (Phase.PREFILL, Phase.DECODE)


def decoding(n: int = 1, tokens: tuple[int, ...] = (10, 11)) -> tuple[RequestState, AttemptRun]:
    """All choices decode and have said the same tokens."""
    choices, stop = tuple(range(n)), StopParams(max_tokens=100)
    first = Attempt("r", 0, choices, PROMPT, len(PROMPT), SamplingParams(seed=5), stop)
    request_state = RequestState(first, max_fruitless_attempts=3)
    (run,) = request_state.next_attempts()
    request_state.placed(0, BOTH)
    request_state.kv_complete(0)
    for choice in range(n):
        request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", choice, 0), 0, tokens))
    return request_state, run


def test_a_choice_that_is_migrated_out_goes_on_before_its_newest_token() -> None:
    request_state, run = decoding(n=2)
    assert request_state.migrated_out(0, 1, 2)
    assert run.running == {0} and not run.over
    (moved,) = request_state.next_attempts()
    states = [moved.state]
    assert moved.moved
    assert (moved.attempt.choices, moved.attempt.token_ids) == ((1,), (*PROMPT, 10))
    request_state.placed(1, {Phase.DECODE})
    states.append(moved.state)
    request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 1, 0), 2, (66,)))
    request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 1, 1), 1, (11, 12)))
    assert request_state.logs[1].token_ids() == (10, 11, 12)
    request_state.kv_complete(1)
    states.append(moved.state)
    assert states == [AttemptState.PLACING, AttemptState.MOVING, AttemptState.DECODING]
    assert request_state.migrated_out(0, 0, 2)
    assert run.state is AttemptState.ENDED
    assert Phase.DECODE not in run.to_cancel, "it frees what it gave away by itself"


def test_a_move_that_fails_counts_for_nothing_and_the_choice_returns() -> None:
    request_state, before = decoding()
    for number in range(1, 30, 3):
        assert request_state.migrated_out(before.attempt.attempt, 0, 2)
        (moved,) = request_state.next_attempts()
        request_state.placed(number, {Phase.DECODE})
        assert not request_state.returns(0)
        request_state.phase_failed(
            number, Phase.DECODE, InvalidArgument("too long for that worker")
        )
        assert moved.state is AttemptState.FAILED and request_state.failure is None
        assert request_state.returns(0)
        (back,) = request_state.next_attempts()
        assert back.moved and back.returned and not request_state.returns(0)
        assert back.attempt.token_ids == (*PROMPT, 10)
        request_state.attempt_failed(number + 1, Unavailable("its old worker is gone, too"))
        assert not request_state.returns(0)
        (again,) = request_state.next_attempts()
        assert not again.moved
        assert again.attempt.token_ids == (*PROMPT, 10, 11)
        request_state.placed(number + 2, BOTH)
        request_state.kv_complete(number + 2)
        before = again


def test_a_choice_that_returned_runs_on_and_may_move_again() -> None:
    request_state, _ = decoding()
    assert request_state.migrated_out(0, 0, 2)
    request_state.next_attempts()
    request_state.attempt_failed(1, Unavailable("that worker is gone"))
    (back,) = request_state.next_attempts()
    request_state.placed(2, {Phase.DECODE})
    request_state.kv_complete(2)
    assert back.state is AttemptState.DECODING
    request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 0, 0), 2, (66,)))
    request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 0, 2), 1, (11, 12)))
    assert request_state.logs[0].token_ids() == (10, 11, 12)
    assert request_state.migrated_out(2, 0, 3)
    (moved,) = request_state.next_attempts()
    assert moved.moved and not moved.returned


def test_what_has_arrived_does_not_return() -> None:
    request_state, _ = decoding()
    assert request_state.migrated_out(0, 0, 2)
    request_state.next_attempts()
    request_state.placed(1, {Phase.DECODE})
    request_state.kv_complete(1)
    request_state.phase_failed(1, Phase.DECODE, Unavailable("that worker is gone"))
    assert not request_state.returns(0)
    (again,) = request_state.next_attempts()
    assert not again.moved


def test_giving_away_what_has_ended_or_is_incomplete() -> None:
    request_state, run = decoding(n=2)
    request_state.stopped(0, 1, "x")
    assert not request_state.migrated_out(0, 0, 2)
    assert request_state.next_attempts() == []
    assert not request_state.migrated_out(0, 1, 3), "a token is missing"
    assert run.state is AttemptState.FAILED
    (again,) = request_state.next_attempts()
    assert not again.moved


def begins(n: int = 2) -> RequestState:
    """Choices of a stream that another router has begun."""
    choices, stop = tuple(range(n)), StopParams(max_tokens=100)
    first = Attempt("r", 0, choices, PROMPT, len(PROMPT), SamplingParams(seed=5), stop)
    return RequestState(first, max_fruitless_attempts=1)


def test_a_choice_is_adopted_with_all_its_tokens() -> None:
    request_state = begins()
    request_state.adopt([1])
    adopted, other = request_state.next_attempts()
    assert adopted.adopts and adopted.moved and not other.adopts and not other.moved
    assert (adopted.attempt.choices, other.attempt.choices) == ((1,), (0,))
    assert adopted.attempt.token_ids == PROMPT
    request_state.placed(0, {Phase.DECODE})
    states = [adopted.state]
    request_state.kv_complete(0)
    request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 1, 0), 0, (10, 11, 12)))
    states.append(adopted.state)
    assert states == [AttemptState.MOVING, AttemptState.DECODING]
    assert request_state.logs[1].token_ids() == (10, 11, 12)
    assert not request_state.next_attempts()


def test_one_that_cannot_be_adopted_runs_as_if_there_had_been_none() -> None:
    request_state = begins(1)
    request_state.adopt([0])
    (adopted,) = request_state.next_attempts()
    request_state.placed(0, {Phase.DECODE})
    request_state.phase_failed(0, Phase.DECODE, HandoverFailed("it is not here any more"))
    assert adopted.state is AttemptState.FAILED and request_state.failure is None
    (run,) = request_state.next_attempts()
    assert not run.moved and not run.adopts and not run.retry
    assert run.attempt.token_ids == PROMPT
