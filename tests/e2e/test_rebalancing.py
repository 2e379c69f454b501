"""Sequences move to an idle decode worker while they run, and say what transformers says."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.relay import PATIENCE_S, Answer, Relay, eventually, options, until_it_comes_about
from tests.e2e.streams import Following
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
TOKENS = 800
ASKED = [
    (list(range(60 + number, 160 + number)), options(max_tokens=TOKENS)) for number in range(10)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    network: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return [greedy_tokens(network, prompt, TOKENS) for prompt, _ in ASKED]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    folder = tmp_path_factory.mktemp("rebalancing")
    running = Relay(folder, "--model", str(BUNDLED), "--decode", "2")
    yield running
    running.close()


def moved(relay: Relay) -> float:
    return relay.metric(relay.router, "baton_moves_total", reason="load", outcome="moved")


def skewed(relay: Relay) -> tuple[Following, dict[str, Any]]:
    """Streams that all run on one decode worker, and the other one, which is there again."""
    relay.wait_for_all()
    absent, _ = relay.processes("decode")

    def serving() -> float:
        return relay.metric(relay.router, "baton_workers", role="decode", state="serving")

    relay.kill(absent, signal.SIGSTOP)
    try:
        eventually(lambda: serving() == 1, PATIENCE_S, "one decode worker is gone")
        streams = Following(relay, ASKED)
        streams.settled()
    finally:
        relay.kill(absent, signal.SIGCONT)
    return streams, absent


def right(streams: Following, expected: list[list[int]]) -> None:
    assert [answer.token_ids[0] for answer in streams.answers()] == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sequences_move_to_an_idle_worker(pair: Relay, expected: list[list[int]]) -> None:
    def they_move() -> bool:
        before, lost = moved(pair), pair.lost_attempts()
        streams, receiver = skewed(pair)
        came = pair.metric(receiver, "baton_kv_source_total", source="moved")
        right(streams, expected)
        gone = moved(pair) - before
        arrived = pair.metric(receiver, "baton_kv_source_total", source="moved") - came
        assert arrived == gone <= len(ASKED) / 2
        assert pair.lost_attempts() == lost, "nothing is computed again"
        return gone > 0

    until_it_comes_about(they_move, "sequences that move for the load")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_receiver_is_killed_while_they_move(pair: Relay, expected: list[list[int]]) -> None:
    """What had moved is computed again, and what was on its way goes on where it was."""

    def killed() -> bool:
        before = moved(pair)
        streams, receiver = skewed(pair)
        eventually(lambda: moved(pair) > before or pair.idle(), PATIENCE_S, "one has moved")
        under_way = not pair.idle()
        pair.kill(receiver)
        right(streams, expected)
        pair.wait_for_all(gone=receiver["pid"])
        return under_way

    until_it_comes_about(killed, "sequences under way")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_moves_for_a_request_that_fits_nowhere(tmp_path: Path) -> None:
    """Two workers have memory for 3072 positions each, of which two streams leave too little for a
    request of 2000 more."""
    network: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    asked = [([60 + number] * 600, options(max_tokens=400)) for number in range(4)]
    large = [50] * 2000
    flags = ("--model", str(BUNDLED), "--decode", "2", "--kv-memory-mib", "12")
    relay = Relay(tmp_path, *flags)
    try:
        relay.wait_for_all()

        def room_was_made() -> bool:
            def count(name: str, **labels: str) -> float:
                return relay.metric(relay.router, name, **labels)

            before = count("baton_moves_total", reason="room", outcome="moved")
            streams = Following(relay, asked)
            streams.settled()
            answer = Answer()
            for response in relay.stream(large, options(max_tokens=20)):
                answer.take(response.event)
            assert answer.token_ids[0] == greedy_tokens(network, large, 20)
            for (prompt, _), given in zip(asked, streams.answers(), strict=True):
                assert given.token_ids[0] == greedy_tokens(network, prompt, 400)
            return count("baton_moves_total", reason="room", outcome="moved") > before

        until_it_comes_about(room_was_made, "a sequence that moves to make room")
        assert relay.lost_attempts() == 0
    finally:
        relay.close()
