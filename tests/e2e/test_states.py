"""Real processes of models that keep a state: the fake runner's, and a tiny one's."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.relay import Relay, until_it_comes_about
from tests.e2e.streams import Following, requests, undisturbed
from tests.engine.tiny_models import save_tiny_model

STATE = 100
"""Positions: blocks and a part of one."""


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["fake", "qwen3_next"])
def test_streams_move_with_their_states_when_a_decode_worker_drains(
    model: str, tmp_path: Path
) -> None:
    if model == "fake":
        flags, asked = ["--runner", "fake"], requests()
        environment = {"BATON_FAKE_STEP_MS": "5", "BATON_FAKE_STATE_POSITIONS": str(STATE)}
    else:
        # Its sequences are computed one after the other.
        flags, asked = ["--model", str(save_tiny_model(model, tmp_path / model))], requests()[:8]
        environment = {"BATON_DTYPE": "float32"}
    relay = Relay(tmp_path, *flags, "--decode", "2", environment=environment)
    try:
        relay.wait_for_all()
        expected = undisturbed(relay, asked)

        def they_move() -> bool:
            streams = Following(relay, asked)
            streams.settled()
            leaving = relay.busiest("decode")
            moved = relay.metric(relay.router, "baton_moves_total", outcome="moved")
            lost = relay.lost_attempts()
            relay.kill(leaving, signal.SIGTERM)
            for answer, wanted in zip(streams.answers(), expected, strict=True):
                assert answer.token_ids == wanted.token_ids
            assert relay.lost_attempts() == lost
            relay.wait_for_all(gone=leaving["pid"])
            return relay.metric(relay.router, "baton_moves_total", outcome="moved") > moved

        until_it_comes_about(they_move, "sequences on a worker that leaves")
        for worker in (*relay.processes("prefill"), *relay.processes("decode")):
            assert relay.metric(worker, "baton_cached_tokens_total") == 0
    finally:
        relay.close()
