"""A request that kills workers is found and ended; those that stood beside it are not."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.errors import HandoverFailed, Quarantined, Unavailable, WorkerLost
from batonlm.core.request.attempt import Attempt, ChoiceTokens, Phase, SequenceKey
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.request.request_state import AttemptRun, RequestState
from batonlm.core.routing.failures import Quarantine

BOTH = (Phase.PREFILL, Phase.DECODE)
GONE = WorkerLost("gone")


def make(name: str = "r") -> RequestState:
    first = Attempt(name, 0, (0,), (1, 2, 3), 3, SamplingParams(), StopParams(max_tokens=100))
    return RequestState(first, max_fruitless_attempts=10)


def start(request_state: RequestState, *phases: Phase) -> AttemptRun:
    (run,) = request_state.next_attempts()
    request_state.placed(run.attempt.attempt, phases)
    return run


def gain(
    request_state: RequestState, run: AttemptRun, count: int, phase: Phase = Phase.DECODE
) -> None:
    key = SequenceKey(request_state.request_id, 0, run.attempt.attempt)
    request_state.tokens(phase, ChoiceTokens(key, run.attempt.position, tuple(range(count))))


def test_two_deaths_with_a_lone_suspect_end_it() -> None:
    request_state = make()
    for suspect in (False, True, True):
        assert request_state.failure is None
        run = start(request_state, Phase.DECODE)
        assert run.suspect is suspect
        request_state.phase_failed(run.attempt.attempt, Phase.DECODE, GONE)
    assert isinstance(request_state.failure, Quarantined)


@pytest.mark.parametrize(
    ("phases", "lost", "tokens", "suspect"),
    [
        ((Phase.DECODE,), Phase.DECODE, 0, True),
        ((Phase.DECODE,), Phase.DECODE, 1, False),
        # Token 0 is prefill's doing: it does not clear what decode died of.
        (BOTH, Phase.DECODE, 1, True),
        (BOTH, Phase.DECODE, 2, False),
        (BOTH, Phase.PREFILL, 0, True),
        (BOTH, Phase.PREFILL, 1, False),
    ],
)
def test_who_is_a_suspect(
    phases: tuple[Phase, ...], lost: Phase, tokens: int, suspect: bool
) -> None:
    request_state = make()
    run = start(request_state, *phases)
    if tokens:
        gain(request_state, run, tokens)
    request_state.phase_failed(0, lost, GONE)
    assert request_state.suspicion.suspect is suspect
    assert start(request_state, *phases).suspect is suspect


@pytest.mark.parametrize("error", [Unavailable("draining"), HandoverFailed("cut")])
def test_only_a_death_makes_suspects(error: Exception) -> None:
    request_state = make()
    start(request_state, *BOTH)
    request_state.phase_failed(0, Phase.DECODE, error)  # type: ignore[arg-type]
    assert not request_state.suspicion.suspect


def test_a_token_clears() -> None:
    request_state = make()
    for number in range(8):
        run = start(request_state, Phase.DECODE)
        assert run.suspect is bool(number % 2)
        if number % 2:
            gain(request_state, run, 1)
        assert not request_state.suspicion.suspect
        request_state.phase_failed(run.attempt.attempt, Phase.DECODE, GONE)
    assert request_state.failure is None


def test_prefill_cannot_clear_what_decode_died_of() -> None:
    request_state = make()
    for _ in range(3):
        run = start(request_state, *BOTH)
        gain(request_state, run, 1, Phase.PREFILL)
        request_state.phase_failed(run.attempt.attempt, Phase.DECODE, GONE)
    assert isinstance(request_state.failure, Quarantined)


def test_one_suspect_a_worker() -> None:
    quarantine = Quarantine()
    with quarantine.entered({"a", "b"}):
        assert quarantine.taken == {"a", "b"}
        with pytest.raises(AssertionError), quarantine.entered({"b"}):
            pass
        with quarantine.entered({"c"}):
            assert quarantine.taken == {"a", "b", "c"}
    assert not quarantine.taken


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), innocents=st.integers(0, 12), workers=st.integers(1, 4))
def test_the_poison_ends_within_three_deaths_and_nobody_else_does(
    seed: int, innocents: int, workers: int
) -> None:
    """Rounds of one step: everybody is placed, the poison kills its worker before anybody there
    gains a token, everybody else gains one."""
    draw = Random(seed)
    request_states = [make(f"r{number}") for number in range(innocents + 1)]
    poison = draw.choice(request_states)
    deaths = 0
    for _ in range(40):
        places: dict[int, list[tuple[RequestState, AttemptRun]]] = {}
        suspects: set[int] = set()
        draw.shuffle(request_states)
        for request_state in request_states:
            if request_state.failure is not None or len(request_state.logs[0]) >= 5:
                continue
            free = [
                w
                for w in range(workers)
                if not request_state.suspicion.suspect or w not in suspects
            ]
            if not free:
                continue
            worker = draw.choice(free)
            run = start(request_state, Phase.DECODE)
            assert not (run.suspect and worker in suspects)
            if run.suspect:
                suspects.add(worker)
            places.setdefault(worker, []).append((request_state, run))
        for here in places.values():
            dies = any(request_state is poison for request_state, _ in here)
            deaths += dies
            for request_state, run in here:
                if not dies:
                    gain(request_state, run, 1)
                error = GONE if dies else Unavailable("it drains")
                request_state.phase_failed(run.attempt.attempt, Phase.DECODE, error)
    assert deaths <= 3
    assert isinstance(poison.failure, Quarantined)
    assert all(
        request_state.failure is None
        for request_state in request_states
        if request_state is not poison
    )
