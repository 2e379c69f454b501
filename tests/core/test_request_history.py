"""What is remembered of requests, for how long, and for whom."""

from __future__ import annotations

import pytest

from batonlm.core.errors import Internal, NotFound, Reason
from batonlm.core.observe.request_record import (
    ATTEMPT_BYTES,
    BASE_BYTES,
    BEST_OF_A_ROLE,
    MAX_ATTEMPTS,
    MAX_LOSSES,
    AttemptRecord,
    Replay,
    RequestRecord,
    best_few,
    digest,
    packed,
)
from batonlm.core.observe.stages import Stage, StageClock
from batonlm.core.request.attempt import Phase
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.routing.routing import Candidate, FilterReason, RoutingPolicy
from batonlm.router.observe.records import RequestHistory

PLENTY = 1 << 30


def record(name: str, tenant: str = "") -> RequestRecord:
    return RequestRecord(
        name, tenant, 0.0, "text", 0, RoutingPolicy(), split=True, clock=StageClock(1.0)
    )


def attempt(number: int) -> AttemptRecord:
    return AttemptRecord(number, 0, 3, 1, False, None, None, "why", 0.5)


def over(one: RequestRecord, error: BaseException | None = None) -> RequestRecord:
    assert one.clock is not None
    one.clock.enter(Stage.OVER, 3.0)
    one.ended(error, (), 2)
    return one


def test_the_oldest_ones_go_first() -> None:
    history = RequestHistory(2, PLENTY)
    for name in "abc":
        one = record(name)
        history.begin(one)
        history.end(over(one))
    assert len(history) == 2
    assert history.find("c", "").over
    with pytest.raises(NotFound):
        history.find("a", "")


def test_a_bound_in_bytes() -> None:
    history = RequestHistory(100, 3 * (BASE_BYTES + ATTEMPT_BYTES))
    for number in range(10):
        one = record(str(number))
        one.add(attempt(0))
        history.begin(one)
        history.end(over(one))
    assert len(history) == 3
    assert history.kept_bytes <= 3 * (BASE_BYTES + ATTEMPT_BYTES)


def test_running_ones_are_found_too_and_stay() -> None:
    history = RequestHistory(1, PLENTY)
    running = record("r")
    history.begin(running)
    for name in "ab":
        one = record(name)
        history.begin(one)
        history.end(over(one))
    assert history.find("r", "") is running
    assert running.so_far(2.5).total_s == 1.5
    assert running.so_far(2.5).tokenize_s == 1.5


def test_nobody_sees_what_others_asked() -> None:
    history = RequestHistory(1, PLENTY)
    history.begin(record("r", "one"))
    assert history.find("r", "one")
    with pytest.raises(NotFound) as others:
        history.find("r", "other")
    with pytest.raises(NotFound) as unknown:
        history.find("never", "other")
    assert others.value.message == unknown.value.message
    assert history.find("r", None), "an operator asks for anybody's"
    with pytest.raises(NotFound):
        history.find("never", None)


def test_none_is_remembered_where_none_shall_be() -> None:
    history = RequestHistory(0, PLENTY)
    one = record("r")
    history.begin(one)
    history.end(over(one))
    assert len(history) == 0


def test_how_it_ended() -> None:
    failed = over(record("r"), Internal("The router failed."))
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.message) == (
        Reason.INTERNAL,
        "The router failed.",
    )
    left = over(record("r"), RuntimeError("secret"))
    assert left.failure is not None and left.failure.reason is Reason.CANCELLED
    assert over(record("r")).failure is None
    assert over(record("r")).so_far(99.0).total_s == 2.0


def test_attempts_and_losses_are_bounded() -> None:
    one = record("r")
    for number in range(40):
        one.add(attempt(number))
    assert len(one.attempts) == MAX_ATTEMPTS
    assert one.num_attempts == 40
    assert one.attempt(0) and one.attempt(39) and one.attempt(20) is None
    last = one.attempts[-1]
    for at in range(9):
        last.lost(Phase.DECODE, Internal("x" * 1000), float(at))
    assert len(last.losses) == MAX_LOSSES
    assert len(last.losses[0].message) < 500


def test_the_best_few_of_each_role() -> None:
    pools = [
        Candidate(WorkerIdentity(role, f"{role}{n}", ""), FilterReason.OUTSCORED)
        for role in ("decode", "prefill")
        for n in range(7)
    ]
    kept, others = best_few(pools)
    assert others == 2 * (7 - BEST_OF_A_ROLE)
    assert [c.identity.instance_id for c in kept[:2]] == ["decode0", "decode1"]
    assert len(kept) == 2 * BEST_OF_A_ROLE


def test_a_replay_has_digests_for_outputs() -> None:
    model = ModelDescription("m", "d", 10, 10, ())
    replay = Replay(model, packed((1, 2)), 2, SamplingParams(seed=3), StopParams(4))
    ended = replay.ended([(1, 2, 3), ()])
    assert ended.prompt == b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert ended.output_tokens == (3, 0)
    assert ended.digests == (digest((1, 2, 3)), digest(()))
    assert digest((1, 2, 3)) != digest((1, 2))


def test_what_ran_on_a_worker_without_exact_mode_is_not_exact() -> None:
    one = record("r")
    model = ModelDescription("m", "d", 10, 10, ())
    one.replay = Replay(model, b"", 1, SamplingParams(), StopParams(4))
    one.served(exact=True)
    assert one.replay.exact
    one.served(exact=False)
    one.served(exact=True)
    assert not one.replay.exact
