"""A rank of a decode worker is killed or stopped under load: streams go on with the same tokens."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.relay import PATIENCE_S, Relay, eventually, until_it_comes_about
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.deep, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two decode workers, all workers with two ranks."""
    flags = ("--tensor-parallel", "2", "--prefill", "1", "--decode", "2")
    running = Relay(tmp_path_factory.mktemp("ranks"), *flags)
    yield running
    running.wait_for_all()
    running.close()


def ranks_of(pid: int) -> list[psutil.Process]:
    """In their order."""
    children = psutil.Process(pid).children()
    return [child for child in children if "batonlm.engine.ranks" in child.cmdline()]


# How an engine notices each of them is in tests/engine/test_rank_processes.py.
@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_streams_go_on_without_a_rank(pair: Relay, number: signal.Signals, rank: int) -> None:
    pair.wait_for_all()
    asked = requests()[:8]
    expected = [answer.token_ids for answer in undisturbed(pair, asked)]

    def streams_lost_a_rank() -> bool:
        pair.wait_for_all()
        before = pair.lost_attempts()
        streams = Following(pair, asked)
        streams.settled()
        victim = pair.busiest("decode")
        ranks = ranks_of(victim["pid"])
        assert len(ranks) == 2
        ranks[rank].send_signal(number)
        assert [answer.token_ids for answer in streams.answers()] == expected
        # A worker notices a rank that is silent for 30 s, and ends. Then so do its ranks, even
        # those that are stopped.
        eventually(
            lambda: not any(rank.is_running() for rank in ranks), PATIENCE_S, "its ranks have ended"
        )
        pair.wait_for_all(gone=victim["pid"])
        return pair.lost_attempts() > before

    until_it_comes_about(streams_lost_a_rank, "streams on a worker that loses a rank")
