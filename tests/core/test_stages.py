"""The stages of a request add up to its time, whatever happens to it."""

from __future__ import annotations

import random

from batonlm.core.observe.stages import Stage, StageClock
from batonlm.core.request.model import WorkerIdentity

PREFILL = WorkerIdentity("prefill", "a" * 32, "p:1")
DECODE = WorkerIdentity("decode", "b" * 32, "d:1")


def test_a_request_that_goes_its_way() -> None:
    clock = StageClock(100.0)
    clock.enter(Stage.TURN, 101.0)
    clock.enter(Stage.PREFILL, 103.0)
    clock.served_by(PREFILL)
    clock.served_by(DECODE)
    clock.served_by(PREFILL)
    clock.prefilled(0.5, 2.0, 106.0)
    clock.first_text(106.25)
    clock.first_text(110.0)
    clock.enter(Stage.DECODE, 107.0)
    clock.enter(Stage.DETOKENIZE, 117.0)
    clock.enter(Stage.OVER, 118.0)
    clock.enter(Stage.DECODE, 130.0)
    times = clock.times()
    assert times.spent() == {
        "tokenize": 1.0,
        "turn": 2.0,
        "prefill_queue": 0.5,
        "prefill": 2.0,
        "network": 0.5,
        "hand_over": 1.0,
        "decode": 10.0,
        "detokenize": 1.0,
    }
    assert (times.first_token_s, times.total_s) == (6.25, 18.0)
    assert times.workers == (PREFILL, DECODE)


def test_decode_that_has_its_kv_before_prefill_has_answered_goes_on_decoding() -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.PREFILL, 0.0)
    clock.enter(Stage.DECODE, 2.0)
    clock.prefilled(0.0, 1.0, 5.0)
    clock.enter(Stage.OVER, 6.0)
    times = clock.times()
    assert (times.prefill_s, times.network_s, times.hand_over_s, times.decode_s) == (1, 1, 0, 4)


def test_a_worker_whose_clock_is_fast_does_not_take_more_time_than_passed() -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.PREFILL, 0.0)
    clock.prefilled(9.0, 2.0, 3.0)
    clock.enter(Stage.OVER, 3.0)
    times = clock.times()
    assert (times.prefill_queue_s, times.prefill_s, times.network_s) == (1.0, 2.0, 0.0)
    assert times.first_token_s == times.total_s == 3.0, "the text came when it was over"


def test_stages_add_up_whatever_the_order() -> None:
    draw = random.Random(7)
    for _ in range(200):
        now = began = draw.random()
        clock = StageClock(began)
        for _ in range(draw.randrange(12)):
            now += draw.random()
            if draw.random() < 0.3:
                clock.prefilled(draw.random(), draw.random(), now)
            else:
                clock.enter(draw.choice(list(Stage)[:-1]), now)
        clock.enter(Stage.OVER, now)
        times = clock.times()
        assert abs(sum(times.spent().values()) - times.total_s) < 1e-9
        assert abs(times.total_s - (now - began)) < 1e-9
        assert min(times.spent().values()) >= -1e-12
