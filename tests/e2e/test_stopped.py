"""A decode worker is stopped in mid-stream: for a moment, which is nothing, or for too long."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.relay import Relay, eventually
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = pytest.mark.chaos

STEP_MS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    running = Relay(
        tmp_path_factory.mktemp("stopped"),
        *("--runner", "fake", "--prefill", "1", "--decode", "2"),
        environment={"BATON_FAKE_STEP_MS": str(STEP_MS)},
    )
    yield running
    running.close()


def lost(relay: Relay) -> float:
    """Attempts that had to be run again."""
    (router,) = relay.processes("router")
    names = ("baton_migrations_total", "baton_retries_total")
    return sum(relay.metric(router, name) for name in names)


@pytest.mark.parametrize("stopped_s", [1.0, None], ids=["for a moment", "for too long"])
def test_a_decode_worker_that_is_stopped(pair: Relay, stopped_s: float | None) -> None:
    asked = requests()[:8]
    expected = [answer.token_ids for answer in undisturbed(pair, asked)]
    before = lost(pair)
    streams = Following(pair, asked)
    streams.settled()
    victim = max(pair.processes("decode"), key=lambda p: pair.metric(p, "baton_sequences"))
    pair.kill(victim, signal.SIGSTOP)
    try:
        if stopped_s is None:
            eventually(lambda: lost(pair) > before, 30, "its sequences went on elsewhere")
        else:
            time.sleep(stopped_s)
    finally:
        pair.kill(victim, signal.SIGCONT)
    assert [answer.token_ids for answer in streams.answers()] == expected
    if stopped_s is not None:
        assert lost(pair) == before
