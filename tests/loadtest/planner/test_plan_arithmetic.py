"""A fleet's arithmetic against sums done by hand, and what must hold of it whatever the numbers."""

from __future__ import annotations

from dataclasses import replace
from math import factorial, inf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.planner.curves import (
    GB,
    KNOWN,
    DecodeRoofline,
    Efficiency,
    MeasuredDecode,
    MeasuredPrefill,
    ModelFacts,
    PrefillRoofline,
    known,
)
from baton_loadtest.planner.fleet import (
    MOST_SPREAD,
    P95,
    Fleet,
    KvRoom,
    Lengths,
    Margins,
    Targets,
    Traffic,
    handover_s,
    plan_fleet,
    queueing,
    wait_s,
)
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed

DENSE = ModelFacts(
    name="dense", dtype="bfloat16", weights=16_000, element=2, body=7000, head=500, experts=0,
    num_experts=1, chosen=1, layers=4, query_heads=8, head_sizes=32, sliding=0, window=0,
    kv_position=512, wire_position=512, max_model_len=10_000, unread=1000,
)  # fmt: skip
MIXED = replace(DENSE, experts=4000, num_experts=8, chosen=2, body=3000)
SLIDING = replace(DENSE, sliding=3, window=100)
H100 = known("H100-SXM")
WHOLE = Efficiency(1.0, 1.0, 0.0)
BIG = ModelFacts(
    name="8b", dtype="bfloat16", weights=16_060_000_000, element=2, body=6_980_000_000,
    head=525_000_000, experts=0, num_experts=1, chosen=1, layers=32, query_heads=32, head_sizes=256,
    sliding=0, window=0, kv_position=131_072, wire_position=131_072, max_model_len=131_072,
    unread=1_050_000_000,
)  # fmt: skip
USUAL = Efficiency(0.5, 0.7, 0.001)
CURVES = PrefillRoofline(BIG, H100, USUAL, 512), DecodeRoofline(BIG, H100, USUAL)
ROOM = KvRoom(300_000, 256)
EASY = Targets(10.0, 0.2)
MARGINS = Margins(0.7, 50 * GB)

rates = st.floats(0.01, 500)
means = st.floats(1, 5000)
spreads = st.floats(1, 3.8)


def lengths(mean: float, ratio: float, what: str = "input") -> Lengths:
    return Lengths(mean, mean * ratio, what)


def planned(traffic: Traffic, targets: Targets = EASY, margins: Margins = MARGINS) -> Fleet:
    return plan_fleet(traffic, targets, margins, CURVES, ROOM, BIG.wire_position)


def chat(rate: float, cached: float = 0.0) -> Traffic:
    return Traffic(rate, Lengths(2000, 6000), Lengths(300, 900), cached)


# Lengths


@given(st.floats(20, 5000), spreads)
def test_lengths_have_the_mean_and_the_percentile_that_they_are_made_from(
    mean: float, ratio: float
) -> None:
    made = lengths(mean, ratio)
    assert fmean(made.points) == pytest.approx(mean, rel=0.02, abs=0.51)
    below = sum(point <= made.p95 + 1 for point in made.points) / len(made.points)
    assert below >= 0.94 or ratio == 1
    assert list(made.points) == sorted(made.points)
    assert made.weighted_mean >= mean * 0.999


def test_few_long_lengths_count_in_squares() -> None:
    """Or a plan would make light of attention, and of waiting behind them."""
    made = Lengths(1000, 3000)
    assert made.average(lambda n: n * n) == pytest.approx(1000 * made.weighted_mean, rel=0.03)


def test_equal_lengths_are_equal() -> None:
    made = Lengths(100, 100)
    assert set(made.points) == {100} and made.weighted_mean == 100
    assert made.average(lambda n: n * n) == 10_000


@pytest.mark.parametrize(
    ("mean", "p95"), [(0, 1), (5, 4), (100, 100 * MOST_SPREAD + 1), (float("nan"), 5), (1, inf)]
)
def test_lengths_that_cannot_be(mean: float, p95: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Lengths(mean, p95, "output")
    assert caught.value.field == "output"


# A model's work


def test_a_dense_models_work_by_hand() -> None:
    # Positions 2, 3 and 4 look at 3, 4 and 5.
    assert DENSE.attended(2, 5) == 12
    attention = 2 * 12 * 4 * 8 * 32
    assert DENSE.prefill_flops(2, 5) == 2 * 3 * 7000 + attention + 2 * 500
    assert DENSE.read_bytes(1) == DENSE.read_bytes(64) == 15_000
    assert DENSE.kv_read_bytes(10) == 5120
    assert DENSE.decode_flops(3, 10) == 3 * (2 * 7500 + 2 * 10 * 4 * 8 * 32)


def test_experts_are_read_when_somebody_chose_them() -> None:
    assert MIXED.active == 3000 + 1000
    one, two, many = (MIXED.read_bytes(tokens) for tokens in (1, 2, 1000))
    assert one == 15_000 - 0.75 * 8000
    assert two == 15_000 - 0.75**2 * 8000
    assert many == pytest.approx(15_000)


@given(st.integers(0, 400), st.integers(0, 400))
def test_a_window_is_counted_position_by_position(first: int, more: int) -> None:
    end = first + more
    whole = sum(range(first + 1, end + 1))
    windowed = sum(min(n, 100) for n in range(first + 1, end + 1))
    assert SLIDING.attended(first, end) == pytest.approx((whole + 3 * windowed) / 4)
    assert SLIDING.looks_at(end) == pytest.approx((end + 3 * min(end, 100)) / 4)


# Rooflines


def test_prefill_is_as_long_as_its_arithmetic_or_its_reading() -> None:
    slow_to_read = replace(H100, bandwidth=1e6, flops=1e12)
    slow_to_compute = replace(H100, bandwidth=1e12, flops=1e6)
    reading = PrefillRoofline(DENSE, slow_to_read, WHOLE, 100)
    computing = PrefillRoofline(DENSE, slow_to_compute, WHOLE, 100)
    assert reading.alone_s(0, 150) == pytest.approx(2 * 0.015)
    assert reading.busy_s(0, 150) == pytest.approx(1.5 * 0.015)
    assert computing.alone_s(0, 150) == pytest.approx(DENSE.prefill_flops(0, 150) / 1e6)
    assert (reading.bound(0, 150), computing.bound(0, 150)) == ("bandwidth", "compute")
    waiting = replace(computing, efficiency=Efficiency(0.5, 1.0, 0.25))
    assert waiting.alone_s(0, 150) == pytest.approx(2 * computing.alone_s(0, 150) + 0.5)


def test_a_decode_step_reads_weights_once_and_kv_for_each() -> None:
    curve = DecodeRoofline(DENSE, replace(H100, bandwidth=1e6), Efficiency(1.0, 0.5, 0.001))
    assert curve.step_s(4, 10) == pytest.approx((15_000 + 4 * 5120) / 5e5 + 0.001)
    assert curve.bound(4, 10) == "bandwidth"
    assert "GB of weights" in curve.why(4, 10)


# Waiting


def test_waiting_is_erlangs() -> None:
    load, workers = 2.0, 3
    terms = [load**k / factorial(k) for k in range(workers)]
    last = load**workers / factorial(workers) * workers / (workers - load)
    chances = queueing(load)
    found = [next(chances) for _ in range(workers)]
    assert found[:2] == [1.0, 1.0]
    assert found[2] == pytest.approx(last / (sum(terms) + last))


def test_waiting_of_one_worker_is_the_textbooks() -> None:
    # Service times that spread as an exponential's: the wait's tail is load * exp(-(1 - load) t).
    assert next(queueing(0.5)) == pytest.approx(0.5)
    found = wait_s(0.5, 1, 0.5, 2.0, 1.0)
    assert 0.5 * 2.718281828 ** (-0.5 * found / 2.0) == pytest.approx(P95)
    assert wait_s(0.5, 1, 0.5, 2.0, 0.0) == pytest.approx(found / 2)
    assert wait_s(1.0, 2, 2.0, 1.0, 1.0) == inf
    assert wait_s(0.04, 2, 0.1, 1.0, 1.0) == 0.0


# Fleets


@given(rates, rates, st.floats(0, 0.9))
def test_more_traffic_never_takes_fewer_workers(one: float, other: float, cached: float) -> None:
    less, more = (planned(chat(rate, cached)) for rate in sorted((one, other)))
    assert less.prefill.workers <= more.prefill.workers
    assert less.decode.workers <= more.decode.workers


@given(rates, st.floats(0.3, 20), st.floats(0.3, 20), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_looser_target_never_takes_more_workers(
    rate: float, first: float, other_first: float, between: float, other_between: float
) -> None:
    strict = Targets(min(first, other_first), min(between, other_between))
    loose = Targets(max(first, other_first), max(between, other_between))
    tight, easy = (planned(chat(rate), targets) for targets in (strict, loose))
    assert tight.prefill.workers >= easy.prefill.workers
    assert tight.decode.workers >= easy.decode.workers
    assert tight.decode.batch <= easy.decode.batch


@given(rates, st.floats(0, 0.9), st.floats(0, 0.9))
def test_more_in_the_cache_takes_no_more_of_anything(rate: float, one: float, other: float) -> None:
    # What waits is not compared: a cache makes prompts shorter, and how they differ another.
    cold, warm = (planned(chat(rate, share)) for share in sorted((one, other)))
    assert warm.prefill.mean_s <= cold.prefill.mean_s
    assert warm.prefill.moved_bytes <= cold.prefill.moved_bytes
    assert warm.decode.workers <= cold.decode.workers


@given(rates, means, spreads, st.floats(2, 1000), spreads)
def test_a_plan_keeps_its_word(
    rate: float, prompt: float, ratio: float, output: float, other: float
) -> None:
    traffic = Traffic(rate, lengths(prompt, ratio), lengths(output, other, "output"))
    found = planned(traffic)
    prefill, decode = found.prefill, found.decode
    assert prefill.load <= 0.7 * prefill.workers * 1.000001
    assert prefill.first_token_s <= EASY.first_token_s
    assert prefill.sent_rate <= 0.7 * 50 * GB * 1.000001
    assert decode.received_rate <= 0.7 * 50 * GB * 1.000001
    assert decode.full_step_s <= EASY.between_tokens_s
    assert decode.step_s <= decode.full_step_s * 1.000001
    assert decode.batch == min(decode.fits, decode.in_time, ROOM.sequences)
    made = decode.running / decode.step_s * decode.workers
    assert made == pytest.approx(rate * (output - 1), rel=1e-3)
    every, answers = found.cost_per_million(traffic, 2.0)
    assert 0 < every < answers


def test_the_ratio_is_that_of_what_a_request_takes() -> None:
    found = planned(chat(100))
    decode_s = 299 / found.decode.tokens_per_s
    assert found.decode_per_prefill == pytest.approx(decode_s / found.prefill.mean_s)
    assert found.decode.workers / found.prefill.workers == pytest.approx(
        found.decode_per_prefill, rel=0.1
    )


def test_a_link_that_is_slow_takes_more_workers_and_is_named() -> None:
    slow = planned(chat(20), margins=Margins(0.7, 1 * GB))
    assert slow.prefill.decided_by == slow.decode.decided_by == "link"
    assert slow.prefill.workers > planned(chat(20)).prefill.workers
    unknown = planned(chat(20), margins=Margins(0.7))
    assert unknown.handover_s is None and unknown.prefill.decided_by == "work"


def test_one_token_takes_no_decode() -> None:
    found = planned(Traffic(5, Lengths(100, 100), Lengths(1, 1)))
    assert found.decode.workers == 1 and found.decode.running == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("traffic", "targets", "field", "words"),
    [
        (chat(1), Targets(0.01, 1.0), "first_token_ms", "6000 tokens (the 95th percentile)"),
        (chat(1), Targets(1.0, 0.001), "between_tokens_ms", "one token of one sequence takes"),
        (chat(1e9), EASY, "rate", "more than 100,000"),
        (Traffic(1, Lengths(200_000, 300_000), Lengths(1000, 3000)), Targets(1e3, 1),
         "output", "does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_reason(
    traffic: Traffic, targets: Targets, field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        planned(traffic, targets)
    assert caught.value.field == field and words in caught.value.message


@pytest.mark.parametrize("value", [0.0, -1.0, inf, float("nan")])
def test_rates_and_targets_that_cannot_be(value: float) -> None:
    for make in (
        lambda: chat(value),
        lambda: Targets(value, 1.0),
        lambda: Targets(1.0, value),
        lambda: Margins(value),
    ):
        with pytest.raises(InvalidArgument):
            make()


def test_measured_curves_are_the_workers_own() -> None:
    speed = WorkerSpeed(0.010, 0.0003, 2e-7, 0.003, 0.0002, 5e-8, 512, 1e9, 0.004)
    assert MeasuredPrefill(speed).alone_s(100, 1000) == speed.prefill_s(100, 1000)
    assert MeasuredDecode(speed).step_s(4, 500) == speed.decode_s(4, 2000)
    curves = MeasuredPrefill(speed), MeasuredDecode(speed)
    found = plan_fleet(chat(1), EASY, MARGINS, curves, ROOM, 1000)
    assert found.decode.full_step_s == speed.decode_s(
        found.decode.batch, found.decode.batch * found.decode.context
    )


@given(st.integers(1, 5000), st.floats(1e6, 1e12))
def test_a_hand_over_ends_no_sooner_than_its_last_chunk(tokens: int, link: float) -> None:
    curve = CURVES[0]
    rest = handover_s(curve, 0, tokens, 1000, link)
    assert min(tokens, 512) * 1000 / link <= rest <= tokens * 1000 / link + 1e-9


def test_gpus_are_found_by_name_and_listed_when_not() -> None:
    assert known("h100 sxm") is known("H100-SXM")
    assert len({gpu.name for gpu in KNOWN}) == len(KNOWN)
    with pytest.raises(InvalidArgument) as caught:
        known("H100")
    assert all(gpu.name in caught.value.message for gpu in KNOWN)


def test_a_state_takes_room_and_moves_with_each_request() -> None:
    state = 5_000
    room = replace(ROOM, state=state)
    plain, found = (
        plan_fleet(chat(1), EASY, MARGINS, CURVES, each, BIG.wire_position) for each in (ROOM, room)
    )
    moved = found.prefill.moved_bytes - plain.prefill.moved_bytes
    assert moved == pytest.approx(state * BIG.wire_position)
    assert found.decode.fits == int(room.positions / (found.decode.grown + state))
    assert found.decode.fits < plain.decode.fits
    assert found.handover_s is not None and plain.handover_s is not None
    more = state * BIG.wire_position / MARGINS.link
    assert found.handover_s == pytest.approx(plain.handover_s + more)
    with pytest.raises(InvalidArgument, match="room for the KV of 100"):
        small = replace(ROOM, positions=state + 100, state=state)
        plan_fleet(chat(1), EASY, MARGINS, CURVES, small, BIG.wire_position)
