"""What is asked: sessions, prompts that share, and lengths that fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest.drive import LONGEST_CACHED, Piece, TokenIds
from baton_loadtest.load.scenario import NAMED, Arrivals, Drawn, Kind, Replay, fixed
from baton_loadtest.traces import BLOCK, Recorded, Trace
from batonlm.core.errors import InvalidArgument

IDS = TokenIds(3, 64, 1899)
MINUTE = Arrivals(Kind.POISSON, 2.0, 60.0)


@settings(max_examples=25)
@given(st.text(), st.integers(0, 600), st.integers(0, 600))
def test_the_shorter_of_a_key_begins_the_longer(key: str, one: int, other: int) -> None:
    short, long = sorted((one, other))
    found = IDS.prompt([Piece(key, long)])
    assert len(found) == long
    assert found[:short] == IDS.prompt([Piece(key, short)])
    assert all(64 <= each <= 1899 for each in found)


def test_ids_are_of_the_key_and_the_seed() -> None:
    piece = [Piece("a", 50)]
    assert TokenIds(3, 64, 1899).prompt(piece) == IDS.prompt(piece)
    assert TokenIds(4, 64, 1899).prompt(piece) != IDS.prompt(piece)
    assert IDS.prompt([Piece("b", 50)]) != IDS.prompt(piece)
    long = [Piece("c", LONGEST_CACHED + 1)]
    assert IDS.prompt(long) == IDS.prompt(long)


@pytest.mark.parametrize(("first", "last"), [(-1, 5), (5, 5), (6, 5), (0, 2**31)])
def test_what_is_no_range_of_ids(first: int, last: int) -> None:
    with pytest.raises(InvalidArgument, match="FIRST-LAST"):
        TokenIds(0, first, last)


@settings(max_examples=25)
@given(
    st.integers(0, 3), st.integers(1, 5), st.integers(2, 3000), st.sampled_from(sorted(NAMED)),
    st.integers(0, 300),
)  # fmt: skip
def test_sessions_fit(seed: int, turns: int, most: int, name: str, shared: int) -> None:
    source = Drawn(
        Arrivals(Kind.POISSON, 1.0, 20.0), NAMED[name],
        scale=0.1, most_tokens=most, turns=turns, shared_tokens=shared, pause_s=1.0,
    )  # fmt: skip
    workload = source.workload(seed)
    assert workload == source.workload(seed)
    for session in workload.sessions:
        assert 1 <= len(session.turns) <= turns
        context = sum(turn.prompt_tokens + turn.output_tokens for turn in session.turns)
        assert context <= most
        assert all(turn.prompt_tokens and turn.output_tokens for turn in session.turns)
        assert session.turns[0].pause_s == 0
    whole = len(workload.sessions) * turns
    assert whole - workload.requests <= workload.shortened <= whole


def test_sessions_of_a_group_begin_alike() -> None:
    source = Drawn(MINUTE, fixed(10, 5), shared_tokens=100, shared_groups=2)
    prompts = [IDS.prompt(one.turns[0].pieces) for one in source.workload(1).sessions]
    assert all(len(prompt) == 110 for prompt in prompts)
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


BLOCKS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@settings(max_examples=25)
@given(st.lists(st.tuples(BLOCKS, st.integers(1, BLOCK)), min_size=2, max_size=6),
       st.floats(0.01, 2))  # fmt: skip
def test_equal_blocks_are_equal_tokens(rows: list[tuple[list[int], int]], scale: float) -> None:
    requests = tuple(
        Recorded(float(n), BLOCK * (len(blocks) - 1) + last, 10, tuple(blocks))
        for n, (blocks, last) in enumerate(rows)
    )
    sessions = Replay(Trace(requests), scale=scale).workload(0).sessions
    prompts = [IDS.prompt(one.turns[0].pieces) for one in sessions]
    size = max(1, round(BLOCK * scale))
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == max(1, round(request.prompt_tokens * scale))
    for (one, _), mine in zip(rows, prompts, strict=True):
        for (other, _), theirs in zip(rows, prompts, strict=True):
            common = 0
            while common < min(len(one), len(other)) - 1 and one[common] == other[common]:
                common += 1
            both = min(common * size, len(mine), len(theirs))
            assert mine[:both] == theirs[:both]


def test_a_trace_without_blocks_shares_nothing() -> None:
    trace = Trace((Recorded(5.0, 100, 7), Recorded(9.0, 100, 0)))
    workload = Replay(trace, speed=2.0).workload(0)
    assert [one.due_s for one in workload.sessions] == [0, 2]
    assert [one.turns[0].output_tokens for one in workload.sessions] == [7, 1]
    first, second = (IDS.prompt(one.turns[0].pieces) for one in workload.sessions)
    assert first != second


def test_a_trace_at_another_rate_in_less_time() -> None:
    trace = Trace(tuple(Recorded(100.0 + n, 10, 1) for n in range(101)))
    replay = Replay(trace, seconds=10.0)
    assert replay.mean_rate == pytest.approx(1.01)
    assert len(replay.workload(0).sessions) == 10
    faster = replay.scaled(3 / replay.mean_rate)
    assert faster.mean_rate == pytest.approx(3)
    assert faster.workload(0).seconds == 10
    assert len(faster.workload(0).sessions) == 30


def test_long_requests_are_cut_and_counted() -> None:
    trace = Trace((Recorded(0.0, 5000, 100, tuple(range(10))), Recorded(1.0, 5, 5000)))
    workload = Replay(trace, most_tokens=1000).workload(0)
    assert workload.shortened == 2
    long, talkative = (session.turns[0] for session in workload.sessions)
    assert (long.prompt_tokens, long.output_tokens) == (900, 100)
    assert (talkative.prompt_tokens, talkative.output_tokens) == (5, 500)
