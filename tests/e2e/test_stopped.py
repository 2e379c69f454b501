"""A decode worker is stopped in mid-stream: for a moment, which is nothing, or for too long."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.relay import PATIENCE_S, Relay, eventually, until_it_comes_about
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = pytest.mark.chaos

STEP_MS = 20
LATE_S = 0.1
"""With the second for which it is stopped well below the two seconds of silence after which a
worker counts as dead: its last heartbeat may be half a second old."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    running = Relay(
        tmp_path_factory.mktemp("stopped"),
        *("--runner", "fake", "--prefill", "1", "--decode", "2"),
        environment={"BATON_FAKE_STEP_MS": str(STEP_MS)},
    )
    yield running
    running.close()


@pytest.mark.parametrize("stopped_s", [1.0, None], ids=["for a moment", "for too long"])
def test_a_decode_worker_that_is_stopped(pair: Relay, stopped_s: float | None) -> None:
    asked = requests()[:8]
    expected = [answer.token_ids for answer in undisturbed(pair, asked)]

    def stopped_in_mid_stream() -> bool:
        before = pair.lost_attempts()
        streams = Following(pair, asked)
        streams.settled()
        victim = pair.busiest("decode")
        there = pair.metric(victim, "baton_sequences")
        began = time.monotonic()
        pair.kill(victim, signal.SIGSTOP)
        try:
            if stopped_s is None:
                eventually(
                    lambda: pair.idle() or pair.lost_attempts() > before,
                    PATIENCE_S,
                    "its sequences went on elsewhere, or had ended",
                )
            else:
                time.sleep(stopped_s)
        finally:
            pair.kill(victim, signal.SIGCONT)
            took_s = time.monotonic() - began
        assert [answer.token_ids for answer in streams.answers()] == expected
        if stopped_s is None:
            return pair.lost_attempts() > before
        # Whoever stops it may be delayed, too.
        if there == 0 or took_s > stopped_s + LATE_S:
            return False
        assert pair.lost_attempts() == before
        return True

    until_it_comes_about(stopped_in_mid_stream, "a worker that is stopped with sequences")
