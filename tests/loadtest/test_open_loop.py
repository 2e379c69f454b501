"""Requests leave when they are due, and their times are right, on a clock that jumps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest import drive
from baton_loadtest.drive import ANSWERED, NOT_SENT, REFUSED, UNENDED, LoadLimits
from baton_loadtest.load.scenario import Arrivals, Drawn, Kind, fixed
from baton_loadtest.load.summary import Objectives, Summary
from baton_loadtest.report import quantile
from tests.loadtest.load.model_client import Asked, ModelClient, even, virtually
from tests.sim.virtual_loop import VirtualLoop


def near(value: float | list[float]) -> object:
    """As near as the clock's own steps."""
    return pytest.approx(value, abs=1e-4)


def test_a_slow_answer_holds_nobody_up() -> None:
    run = virtually(ModelClient(first_s=lambda number: 60.0 if number == 0 else 0.1), even(10, 2))
    assert [one.due_s for one in run.samples] == near([n / 10 for n in range(20)])
    assert [one.left_s for one in run.samples] == near([n / 10 for n in range(20)])
    assert all(one.end == ANSWERED and one.tokens == 3 for one in run.samples)
    assert run.samples[0].first_s == near(60.0)
    for one in run.samples[1:]:
        assert one.first_s - one.due_s == near(0.1)
        assert list(one.gaps_s) == near([0.01, 0.01])
        assert one.ended_s - one.due_s == near(0.12)


@settings(max_examples=25)
@given(st.lists(st.floats(0.001, 5.0), min_size=5, max_size=60))
def test_percentiles_are_those_of_the_latencies_that_were(firsts: list[float]) -> None:
    run = virtually(ModelClient(first_s=lambda number: firsts[number]), even(len(firsts) / 2, 2))
    summary = Summary(run, Objectives(first_s=1.0, between_s=0.05))
    assert len(run.samples) == len(firsts)
    for share in (0.5, 0.9, 0.99):
        assert quantile(summary.latencies.first, share) == near(quantile(firsts, share))
    assert summary.kept and not summary.warnings()
    assert abs(summary.met - sum(first <= 1.0 for first in firsts)) <= sum(
        abs(first - 1.0) < 1e-4 for first in firsts
    )


def test_waiting_in_this_process_counts() -> None:
    """For a second and a half it does nothing at all: what was due meanwhile leaves late, and its
    users waited, although the server was as fast as ever."""
    loop = VirtualLoop()

    def freeze(number: int) -> None:
        if number == 10:
            loop.virtual.now += 1.5

    run = virtually(ModelClient(before=freeze), even(10, 4), loop=loop)
    summary = Summary(run, Objectives())
    late = run.samples[11:26]
    for one in late[1:]:
        assert one.lag_s == near(2.5 - one.due_s)
        assert one.first_s - one.left_s == near(0.1)
        assert one.first_s - one.due_s == near(0.1 + one.lag_s)
    assert run.samples[30].lag_s == near(0.0)
    assert not summary.kept
    assert "was not kept" in summary.warnings()[0]
    assert quantile(summary.latencies.first, 0.9) > 1.0
    assert quantile(summary.latencies.first_left, 0.5) == near(0.1)


def test_a_frozen_server_is_seen_by_all_who_came_meanwhile() -> None:
    """It answers nothing from 1 s to 3 s. A client that waits for its last answer would have seen
    one slow request."""

    def first_s(number: int) -> float:
        due_s = number / 100
        return 3.0 - due_s + 0.01 if 1.0 <= due_s < 3.0 else 0.01

    run = virtually(ModelClient(first_s=first_s), even(100, 10))
    slow = sum(one.first_s - one.due_s > 0.1 for one in run.samples)
    assert 188 <= slow <= 192
    assert quantile(Summary(run, Objectives()).latencies.first, 0.9) == near(1.02)


def test_too_many_open_are_not_sent_and_said() -> None:
    run = virtually(ModelClient(first_s=lambda number: 1.0), even(10, 2), LoadLimits(open=5))
    ends = [one.end for one in run.samples]
    assert ends.count(NOT_SENT) == 10
    assert run.most_open == 5
    summary = Summary(run, Objectives())
    assert not summary.kept
    assert summary.warnings() == ["10 of 20 requests were not sent: 5 were open."]
    assert summary.share_met == 0.5


def test_what_takes_too_long_is_given_up() -> None:
    client = ModelClient(first_s=lambda number: 100.0)
    run = virtually(client, even(1, 2), LoadLimits(request_s=30.0))
    assert [one.end for one in run.samples] == ["timed out"] * 2
    assert run.samples[0].ended_s == near(30.0)
    run = virtually(client, even(1, 2), LoadLimits(request_s=30.0, rest_s=10.0))
    assert [one.end for one in run.samples] == [UNENDED] * 2


def test_an_answer_without_a_token_is_none() -> None:
    class Silent(ModelClient):
        async def ask(self, request: Asked, hear: Callable[[Sequence[int], int], None]) -> str:
            return ANSWERED

    run = virtually(Silent(), even(1, 1))
    assert run.samples[0].end == "no token"


def test_prompts_are_made_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four tokens each before the first is due, and one more for each that leaves."""
    made: list[int] = []

    class Counting(ModelClient):
        def prepare(self, ids: Sequence[int], output_tokens: int) -> Asked:
            made.append(len(self.asked))
            return super().prepare(ids, output_tokens)

    monkeypatch.setattr(drive, "AHEAD_TOKENS", 8)
    client = Counting()
    run = virtually(client, even(10, 1))
    assert made == [0, 0, *range(9)][: len(made)] and len(made) == 10
    assert [len(prompt) for prompt, _ in client.asked] == [4] * 10
    assert len({prompt for prompt, _ in client.asked}) == 10
    assert [one.left_s for one in run.samples] == near([n / 10 for n in range(10)])


def test_a_turn_begins_with_all_that_was_said() -> None:
    client = ModelClient()
    source = Drawn(
        Arrivals(Kind.CONSTANT, 0.1, 1.0), fixed(5, 3), turns=3, pause_s=2.0, shared_tokens=7
    )
    workload = source.workload(0)
    run = virtually(client, workload)
    prompts = [prompt for prompt, _ in client.asked]
    assert [len(prompt) for prompt in prompts] == [12, 20, 28]
    answer = (10_000, 10_001, 10_002)
    assert prompts[1][:15] == prompts[0] + answer
    assert prompts[2][:23] == prompts[1] + answer
    for turn, before, after in zip(
        workload.sessions[0].turns[1:], run.samples, run.samples[1:], strict=False
    ):
        assert after.due_s == near(before.ended_s + turn.pause_s)
        assert after.lag_s == near(0.0)
    assert [one.turn for one in run.samples] == [0, 1, 2]


def test_a_session_ends_where_it_fails() -> None:
    client = ModelClient(end=lambda number: REFUSED if number == 1 else ANSWERED)
    source = Drawn(Arrivals(Kind.CONSTANT, 0.1, 1.0), fixed(5, 3), turns=4)
    run = virtually(client, source.workload(0))
    assert [one.end for one in run.samples] == [ANSWERED, REFUSED]
    assert run.not_asked == 2
    assert "2 further turns were not asked" in Summary(run, Objectives()).warnings()[0]


def test_a_session_that_takes_too_long_is_cut_off() -> None:
    source = Drawn(Arrivals(Kind.CONSTANT, 0.1, 1.0), fixed(5, 3), turns=4, pause_s=1000.0)
    run = virtually(ModelClient(), source.workload(0), LoadLimits(rest_s=5.0))
    assert [one.end for one in run.samples] == [ANSWERED]
    assert run.not_asked == 3 and not run.stopped


def test_a_run_is_stopped() -> None:
    run = virtually(ModelClient(first_s=lambda number: 5.0), even(10, 60), stop_s=1.05)
    assert run.stopped
    assert [one.end for one in run.samples] == [UNENDED] * 11
    assert Summary(run, Objectives()).warnings()[0] == "Stopped before its end."


def test_a_fault_of_ours_is_not_a_sample() -> None:
    def broken(number: int) -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError):
        virtually(ModelClient(before=broken), even(10, 1))
