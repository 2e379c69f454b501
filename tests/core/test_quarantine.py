"""A request that kills workers is found and ended; those that stood beside it are not."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.attempt import ChoiceTokens, SequenceKey
from baton.core.attempt_states import Leg
from baton.core.errors import HandoverFailed, Quarantined, Unavailable, WorkerLost
from baton.core.journey import AttemptRun, Journey
from baton.core.quarantine import Quarantine
from baton.core.request import SamplingParams, StopParams

BOTH = (Leg.PREFILL, Leg.DECODE)
GONE = WorkerLost("gone")


def make(name: str = "r") -> Journey:
    return Journey(
        name,
        (1, 2, 3),
        n=1,
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=100),
        max_barren=10,
    )


def start(journey: Journey, *legs: Leg) -> AttemptRun:
    (run,) = journey.next_attempts()
    journey.placed(run.attempt.attempt, legs)
    return run


def gain(journey: Journey, run: AttemptRun, count: int, leg: Leg = Leg.DECODE) -> None:
    key = SequenceKey(journey.request_id, 0, run.attempt.attempt)
    journey.tokens(leg, ChoiceTokens(key, run.attempt.position, tuple(range(count))))


def test_two_deaths_with_a_lone_suspect_end_it() -> None:
    journey = make()
    for suspect in (False, True, True):
        assert journey.failure is None
        run = start(journey, Leg.DECODE)
        assert run.suspect is suspect
        journey.leg_failed(run.attempt.attempt, Leg.DECODE, GONE)
    assert isinstance(journey.failure, Quarantined)


@pytest.mark.parametrize(
    ("legs", "lost", "tokens", "suspect"),
    [
        ((Leg.DECODE,), Leg.DECODE, 0, True),
        ((Leg.DECODE,), Leg.DECODE, 1, False),
        # Token 0 is prefill's doing: it does not clear what decode died of.
        (BOTH, Leg.DECODE, 1, True),
        (BOTH, Leg.DECODE, 2, False),
        (BOTH, Leg.PREFILL, 0, True),
        (BOTH, Leg.PREFILL, 1, False),
    ],
)
def test_who_is_a_suspect(legs: tuple[Leg, ...], lost: Leg, tokens: int, suspect: bool) -> None:
    journey = make()
    run = start(journey, *legs)
    if tokens:
        gain(journey, run, tokens)
    journey.leg_failed(0, lost, GONE)
    assert journey.suspicion.suspect is suspect
    assert start(journey, *legs).suspect is suspect


@pytest.mark.parametrize("error", [Unavailable("draining"), HandoverFailed("cut")])
def test_only_a_death_makes_suspects(error: Exception) -> None:
    journey = make()
    start(journey, *BOTH)
    journey.leg_failed(0, Leg.DECODE, error)  # type: ignore[arg-type]
    assert not journey.suspicion.suspect


def test_a_token_clears() -> None:
    journey = make()
    for number in range(8):
        run = start(journey, Leg.DECODE)
        assert run.suspect is bool(number % 2)
        if number % 2:
            gain(journey, run, 1)
        assert not journey.suspicion.suspect
        journey.leg_failed(run.attempt.attempt, Leg.DECODE, GONE)
    assert journey.failure is None


def test_prefill_cannot_clear_what_decode_died_of() -> None:
    journey = make()
    for _ in range(3):
        run = start(journey, *BOTH)
        gain(journey, run, 1, Leg.PREFILL)
        journey.leg_failed(run.attempt.attempt, Leg.DECODE, GONE)
    assert isinstance(journey.failure, Quarantined)


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
    journeys = [make(f"r{number}") for number in range(innocents + 1)]
    poison = draw.choice(journeys)
    deaths = 0
    for _ in range(40):
        places: dict[int, list[tuple[Journey, AttemptRun]]] = {}
        suspects: set[int] = set()
        draw.shuffle(journeys)
        for journey in journeys:
            if journey.failure is not None or len(journey.logs[0]) >= 5:
                continue
            free = [w for w in range(workers) if not journey.suspicion.suspect or w not in suspects]
            if not free:
                continue
            worker = draw.choice(free)
            run = start(journey, Leg.DECODE)
            assert not (run.suspect and worker in suspects)
            if run.suspect:
                suspects.add(worker)
            places.setdefault(worker, []).append((journey, run))
        for here in places.values():
            dies = any(journey is poison for journey, _ in here)
            deaths += dies
            for journey, run in here:
                if not dies:
                    gain(journey, run, 1)
                error = GONE if dies else Unavailable("it drains")
                journey.leg_failed(run.attempt.attempt, Leg.DECODE, error)
    assert deaths <= 3
    assert isinstance(poison.failure, Quarantined)
    assert all(journey.failure is None for journey in journeys if journey is not poison)
