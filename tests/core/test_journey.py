"""RequestState: whatever workers do, the answer is the model's, each position accepted once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batonlm.core.errors import (
    BatonError,
    HandoverFailed,
    Internal,
    InvalidArgument,
    Overloaded,
    Reason,
    Unavailable,
)
from batonlm.core.request.attempt import (
    OVER,
    TRANSITIONS,
    Attempt,
    AttemptEvent,
    AttemptState,
    ChoiceTokens,
    Phase,
    SequenceKey,
)
from batonlm.core.request.request import FinishReason, SamplingParams, StopParams
from batonlm.core.request.request_state import VERDICTS, AttemptRun, RequestState
from tests.depth import examples

PROMPT = (1, 2, 3)
END = 99


def next_token(ids: tuple[int, ...], choice: int) -> int:
    """A made-up model; about one token in 9 ends the answer."""
    number = hash((ids, choice, 17)) % 90
    return END if number < 10 else number


def whole(choice: int, max_tokens: int) -> tuple[int, ...]:
    output: tuple[int, ...] = ()
    while len(output) < max_tokens and END not in output:
        output += (next_token(PROMPT + output, choice),)
    return output


def make(n: int = 1, max_tokens: int = 12, max_fruitless_attempts: int = 3) -> RequestState:
    choices, stop = tuple(range(n)), StopParams(max_tokens=max_tokens)
    first = Attempt("r", 0, choices, PROMPT, len(PROMPT), SamplingParams(seed=5), stop)
    return RequestState(first, max_fruitless_attempts)


def tokens_of(
    attempt: Attempt, choice: int, start: int, count: int, max_tokens: int
) -> ChoiceTokens:
    """What a worker says of an attempt: `count` tokens from output position `start`."""
    output = tuple(attempt.token_ids[attempt.num_prompt_tokens :])
    while len(output) < start + count and END not in output and len(output) < max_tokens:
        output += (next_token(PROMPT + output, choice),)
    said = output[start : start + count]
    reason, stop = None, None
    if said and start + len(said) == len(output):
        if output[-1] == END:
            reason, stop = FinishReason.STOP, END
        elif len(output) == max_tokens:
            reason = FinishReason.LENGTH
    return ChoiceTokens(SequenceKey("r", choice, attempt.attempt), start, said, (), reason, stop)


class AnyOrder(RuleBasedStateMachine):
    """Workers of any number of attempts, live and dead, say anything that they may say."""

    max_tokens = 12

    @initialize(n=st.integers(1, 4))
    def begin(self, n: int) -> None:
        self.n = n
        self.request_state = make(n, self.max_tokens, max_fruitless_attempts=10**6)
        self.runs: list[AttemptRun] = []
        self.accepted: list[list[int]] = [[] for _ in range(n)]

    @rule()
    def start_what_waits(self) -> None:
        for run in self.request_state.next_attempts():
            phases = (
                {Phase.PREFILL, Phase.DECODE}
                if self.request_state.needs_decode(run.attempt)
                else {Phase.PREFILL}
            )
            if run.moved:
                phases = {Phase.DECODE}
                assert (
                    self.request_state.needs_decode(run.attempt) and len(run.attempt.choices) == 1
                )
            for choice in run.attempt.choices:
                output = self.request_state.logs[choice].token_ids()
                assert run.attempt.token_ids == PROMPT + (output[:-1] if run.moved else output)
            self.request_state.placed(run.attempt.attempt, phases)
            self.runs.append(run)

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data(), phase=st.sampled_from(Phase))
    def say_tokens(self, data: st.DataObject, phase: Phase) -> None:
        run = data.draw(st.sampled_from(self.runs))
        choice = data.draw(st.sampled_from(run.attempt.choices))
        base = run.attempt.position
        # A live worker's next tokens, or a repetition: it may begin anywhere below the next one.
        known = len(self.request_state.logs[choice])
        start = base if phase is Phase.PREFILL else data.draw(st.integers(base, max(base, known)))
        count = 1 if phase is Phase.PREFILL else data.draw(st.integers(1, 4))
        said = tokens_of(run.attempt, choice, start, count, self.max_tokens)
        if not said.token_ids:
            return
        before = self.request_state.logs[choice].token_ids()
        self.request_state.tokens(phase, said)
        after = self.request_state.logs[choice].token_ids()
        assert after[: len(before)] == before
        self.accepted[choice] += after[len(before) :]

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data(), phase=st.sampled_from(Phase))
    def lose_a_phase(self, data: st.DataObject, phase: Phase) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if phase is Phase.DECODE and not self.request_state.needs_decode(run.attempt):
            return
        if phase is Phase.PREFILL and (run.state is AttemptState.HANDING_OVER or run.moved):
            return
        choices = data.draw(st.sets(st.sampled_from(run.attempt.choices)))
        error = data.draw(
            st.sampled_from([Unavailable("x"), Internal("x"), Overloaded("x"), HandoverFailed("x")])
        )
        self.request_state.phase_failed(
            run.attempt.attempt, phase, error, choices if phase is Phase.DECODE else ()
        )

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data())
    def complete_kv(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if self.request_state.needs_decode(run.attempt):
            self.request_state.kv_complete(run.attempt.attempt)

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data())
    def answer_prefill(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if run.state in (AttemptState.PAIRED, AttemptState.PREFILLING):
            for choice in run.attempt.choices:
                self.say(run, choice)
            self.request_state.prefill_answered(run.attempt.attempt)

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data())
    def lose_tokens(self, data: st.DataObject) -> None:
        """A gap: nothing of it may be accepted."""
        run = data.draw(st.sampled_from(self.runs))
        choice = data.draw(st.sampled_from(run.attempt.choices))
        log = self.request_state.logs[choice]
        before = log.token_ids()
        key = SequenceKey("r", choice, run.attempt.attempt)
        self.request_state.tokens(Phase.DECODE, ChoiceTokens(key, len(before) + 1, (7,)))
        assert log.token_ids() == before
        assert run.over or choice not in run.running

    @precondition(lambda self: bool(getattr(self, "runs", [])))
    @rule(data=st.data())
    def migrate_out(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        choice = data.draw(st.sampled_from(run.attempt.choices))
        position = len(self.request_state.logs[choice])
        if run.state is not AttemptState.DECODING or not position:
            return
        expected = choice in run.running
        assert self.request_state.migrated_out(run.attempt.attempt, choice, position) is expected

    def say(self, run: AttemptRun, choice: int) -> None:
        said = tokens_of(run.attempt, choice, run.attempt.position, 1, self.max_tokens)
        before = len(self.request_state.logs[choice])
        self.request_state.tokens(Phase.PREFILL, said)
        self.accepted[choice] += self.request_state.logs[choice].token_ids(before)

    @invariant()
    def answers_are_the_models(self) -> None:
        for choice in range(getattr(self, "n", 0)):
            expected = whole(choice, self.max_tokens)
            log = self.request_state.logs[choice]
            assert log.token_ids() == tuple(self.accepted[choice]) == expected[: len(log)]
            assert log.ended == (len(log) == len(expected))

    @invariant()
    def every_choice_is_in_one_place(self) -> None:
        running: list[int] = []
        for run in getattr(self, "runs", []):
            if not run.over:
                assert run.running, "an attempt with nothing to run is over"
                running += run.running
        assert len(running) == len(set(running))
        for choice in range(getattr(self, "n", 0)):
            log = self.request_state.logs[choice]
            assert not (log.ended and choice in running)
            if not log.ended and log.attempt is not None:
                assert choice in running

    def teardown(self) -> None:
        """From wherever it got, undisturbed workers finish it."""
        if not hasattr(self, "request_state"):
            return
        for _ in range(3):
            self.start_what_waits()
            for run in self.runs:
                for choice in sorted(run.running):
                    said = tokens_of(
                        run.attempt,
                        choice,
                        len(self.request_state.logs[choice]),
                        99,
                        self.max_tokens,
                    )
                    before = len(self.request_state.logs[choice])
                    self.request_state.tokens(Phase.DECODE, said)
                    self.accepted[choice] += self.request_state.logs[choice].token_ids(before)
        self.answers_are_the_models()
        assert self.request_state.done
        assert self.request_state.failure is None
        assert all(run.over for run in self.runs)


AnyOrder.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


def test_the_table_is_complete() -> None:
    """Every state that is not over says what each event means, but for those that cannot be."""
    cannot: set[tuple[AttemptState, AttemptEvent]] = {
        (state, event)
        for state in AttemptState
        for event in (
            AttemptEvent.PLACED_ON_BOTH,
            AttemptEvent.PLACED_ON_PREFILL,
            AttemptEvent.PLACED_ON_DECODE,
            AttemptEvent.PLACED_TO_MOVE,
        )
        if state is not AttemptState.PLACING
    }
    cannot |= {
        (AttemptState.PLACING, event)
        for event in AttemptEvent
        if not event.name.startswith("PLACED") and event is not AttemptEvent.NOTHING_LEFT
    }
    # No decode worker there; and the answer of prefill, good or bad, comes once.
    cannot |= {
        (AttemptState.PREFILLING, AttemptEvent.KV_COMPLETE),
        (AttemptState.PREFILLING, AttemptEvent.DECODE_LOST),
        (AttemptState.HANDING_OVER, AttemptEvent.PREFILL_ANSWERED),
        (AttemptState.HANDING_OVER, AttemptEvent.PREFILL_LOST),
        (AttemptState.MOVING, AttemptEvent.PREFILL_ANSWERED),
        (AttemptState.MOVING, AttemptEvent.PREFILL_LOST),
    }
    open_states = [state for state in AttemptState if state not in OVER]
    assert set(TRANSITIONS) == set(itertools.product(open_states, AttemptEvent)) - cannot


def test_every_reason_has_a_verdict() -> None:
    assert set(VERDICTS) == set(Reason)


def start(request_state: RequestState, *phases: Phase) -> AttemptRun:
    (run,) = request_state.next_attempts()
    request_state.placed(run.attempt.attempt, phases)
    return run


BOTH = (Phase.PREFILL, Phase.DECODE)


@pytest.mark.parametrize(
    ("phases", "lost", "to_cancel"),
    [
        (BOTH, Phase.PREFILL, {Phase.DECODE}),
        (BOTH, Phase.DECODE, {Phase.PREFILL}),
        ((Phase.DECODE,), Phase.DECODE, set()),
        ((Phase.PREFILL,), Phase.PREFILL, set()),
    ],
)
def test_the_other_phase_is_cancelled(
    phases: tuple[Phase, ...], lost: Phase, to_cancel: set[Phase]
) -> None:
    request_state = make()
    run = start(request_state, *phases)
    request_state.phase_failed(0, lost, Unavailable("gone"))
    assert run.state is AttemptState.FAILED
    assert run.to_cancel == to_cancel
    assert [again.attempt.attempt for again in request_state.next_attempts()] == [1]


def test_prefill_lost_after_the_kv_was_collected_is_no_loss() -> None:
    request_state = make()
    run = start(request_state, *BOTH)
    request_state.kv_complete(0)
    request_state.phase_failed(0, Phase.PREFILL, Unavailable("gone"))
    assert run.state is AttemptState.DECODING
    assert request_state.next_attempts() == []


def test_a_stop_string_ends_one_choice_and_the_attempt_goes_on() -> None:
    request_state = make(n=2, max_tokens=100)
    run = start(request_state, *BOTH)
    for choice in range(2):
        key = SequenceKey("r", choice, 0)
        request_state.tokens(Phase.DECODE, ChoiceTokens(key, 0, (10, 11, 12, 13)))
    assert request_state.stopped(0, 1, "x") == 0
    assert request_state.logs[0].token_ids() == (10, 11)
    assert run.running == {1}
    assert request_state.stopped(1, 2, "x") is None
    assert run.state is AttemptState.ENDED
    assert run.to_cancel == set(BOTH)
    assert request_state.done


def test_groups_with_different_output_become_attempts_of_their_own() -> None:
    request_state = make(n=3, max_tokens=100)
    start(request_state, *BOTH)
    for choice, ids in enumerate([(10, 11), (10,), (10, 11)]):
        request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", choice, 0), 0, ids))
    request_state.phase_failed(0, Phase.DECODE, Unavailable("gone"))
    attempts = [run.attempt for run in request_state.next_attempts()]
    assert [(a.attempt, a.choices, a.token_ids) for a in attempts] == [
        (1, (0, 2), (1, 2, 3, 10, 11)),
        (2, (1,), (1, 2, 3, 10)),
    ]
    assert [a.num_prompt_tokens for a in attempts] == [3, 3]


@given(st.lists(st.sampled_from(["barren", "progress", "busy"]), max_size=20))
def test_failures_count_only_without_progress(history: list[str]) -> None:
    request_state = make(max_tokens=1000, max_fruitless_attempts=3)
    fruitless_attempts = 0
    for what in history:
        run = start(request_state, *BOTH)
        attempt = run.attempt
        if what == "progress":
            key = SequenceKey("r", 0, attempt.attempt)
            request_state.tokens(Phase.DECODE, ChoiceTokens(key, attempt.position, (5, 6)))
        error: BatonError = Overloaded("full") if what == "busy" else Unavailable("gone")
        request_state.phase_failed(attempt.attempt, Phase.DECODE, error)
        fruitless_attempts = 0 if what == "progress" else fruitless_attempts + (what == "barren")
        assert (request_state.failure is not None) == (fruitless_attempts >= 3)
        if request_state.failure is not None:
            assert request_state.next_attempts() == []
            return


def test_a_fault_of_the_request_ends_it_at_once() -> None:
    request_state = make(n=2)
    run = start(request_state, *BOTH)
    error = InvalidArgument("bad")
    request_state.phase_failed(0, Phase.PREFILL, error)
    assert request_state.failure is error
    assert request_state.done
    assert run.to_cancel == {Phase.DECODE}


def test_ending_the_request_cancels_all_that_runs() -> None:
    request_state = make()
    run = start(request_state, *BOTH)
    request_state.fail(Unavailable("leaving"))
    assert run.over
    assert run.to_cancel == set(BOTH)
    assert not request_state.tokens(Phase.DECODE, ChoiceTokens(SequenceKey("r", 0, 0), 0, (1,)))


def test_an_answer_of_prefill_alone_must_end_every_choice() -> None:
    request_state = make(max_tokens=1)
    run = start(request_state, Phase.PREFILL)
    request_state.tokens(Phase.PREFILL, ChoiceTokens(SequenceKey("r", 0, 0), 0, (5,)))
    request_state.prefill_answered(0)
    assert run.state is AttemptState.FAILED
    assert not request_state.done
