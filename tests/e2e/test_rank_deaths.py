"""A rank of a decode worker is killed or stopped under load: streams go on with the same tokens."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.relay import Relay, eventually
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.deep]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two decode workers, all workers with two ranks."""
    flags = ("--tensor-parallel", "2", "--prefill", "1", "--decode", "2")
    running = Relay(tmp_path_factory.mktemp("ranks"), *flags)
    yield running
    eventually(lambda: all_serve(running), 120, "two decode workers serve")
    running.close()


def ranks_of(pid: int) -> list[psutil.Process]:
    """In their order."""
    children = psutil.Process(pid).children()
    return [child for child in children if "batonlm.engine.ranks" in child.cmdline()]


def all_serve(relay: Relay) -> bool:
    (router,) = relay.processes("router")
    serving = relay.metric(router, "baton_workers", role="decode", state="serving")
    return len(relay.processes("decode")) == 2 and serving == 2


def lost(relay: Relay) -> float:
    """Attempts that had to be run again."""
    (router,) = relay.processes("router")
    names = ("baton_migrations_total", "baton_retries_total")
    return sum(relay.metric(router, name) for name in names)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_without_a_rank(pair: Relay, number: signal.Signals, rank: int) -> None:
    eventually(lambda: all_serve(pair), 120, "two decode workers serve")
    asked = requests()[:8]
    expected = [answer.token_ids for answer in undisturbed(pair, asked)]
    before = lost(pair)
    streams = Following(pair, asked)
    streams.settled()
    victim = max(pair.processes("decode"), key=lambda p: pair.metric(p, "baton_sequences"))
    ranks = ranks_of(victim["pid"])
    assert len(ranks) == 2
    ranks[rank].send_signal(number)
    assert [answer.token_ids for answer in streams.answers()] == expected
    assert lost(pair) > before
    # A worker notices a rank that is silent for 30 s, and ends. Then so do its ranks, even those
    # that are stopped.
    eventually(lambda: not any(rank.is_running() for rank in ranks), 90, "its ranks have ended")
    eventually(
        lambda: victim["pid"] not in [p["pid"] for p in pair.processes("decode")],
        60,
        "another worker in its place",
    )
