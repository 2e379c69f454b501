"""Clients that leave and processes that stop: everything they held is given back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from batonlm.cli import state
from tests.e2e.relay import PATIENCE_S, Relay, eventually, options, until_it_comes_about
from tests.shared_memory import abandoned

PROMPT = list(range(60, 460))
TOKENS = 1000


def used(relay: Relay) -> float:
    """Blocks, buffers and sequences in use on all workers, and open requests."""
    total = relay.metric(relay.processes("router")[0], "baton_requests_open")
    for worker in relay.processes("prefill") + relay.processes("decode"):
        total += relay.metric(worker, "baton_blocks", state="used")
        total += relay.metric(worker, "baton_slots", state="used")
        total += relay.metric(worker, "baton_swap_blocks", state="used")
        total += relay.metric(worker, "baton_sequences")
        total += relay.metric(worker, "baton_leaks")
    return total


def sampled(relay: Relay) -> float:
    return sum(relay.metric(p, "baton_decode_tokens_total") for p in relay.processes("decode"))


@pytest.mark.parametrize("events", [1, 2, 20])
def test_a_client_that_leaves_frees_everything(relay: Relay, events: int) -> None:
    def it_left_in_the_middle() -> bool:
        eventually(lambda: used(relay) == 0, PATIENCE_S, "idle before")
        before = sampled(relay)
        stream = relay.stream(PROMPT, options(max_tokens=TOKENS))
        for _ in zip(range(events), stream, strict=False):
            pass
        stream.cancel()  # type: ignore[attr-defined]
        eventually(lambda: used(relay) == 0, PATIENCE_S, "everything freed")
        return sampled(relay) - before < TOKENS

    until_it_comes_about(it_left_in_the_middle, "a client that leaves before the last token")


def test_an_http_client_that_leaves_frees_everything(relay: Relay) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{relay.http}/v1/completions"

    def it_left_in_the_middle() -> bool:
        before = sampled(relay)
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        eventually(lambda: used(relay) == 0, PATIENCE_S, "everything freed")
        return sampled(relay) - before < TOKENS

    until_it_comes_about(it_left_in_the_middle, "a client that leaves before the last token")


@contextmanager
def small(folder: Path) -> Iterator[Relay]:
    relay = Relay(folder, "--runner", "fake")
    try:
        yield relay
    finally:
        relay.close()


def all_of(relay: Relay) -> list[dict[str, Any]]:
    """As `state.alive` takes them."""
    return [*relay.processes(), state.process(relay.supervisor)]


@pytest.mark.deep
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_no_process_outlives_the_supervisor(tmp_path: Path, number: int) -> None:
    before = abandoned()
    with small(tmp_path) as relay:
        relay.generate(PROMPT, options(max_tokens=8))
        everyone = all_of(relay)
        os.kill(relay.supervisor, number)
        eventually(lambda: not any(map(state.alive, everyone)), PATIENCE_S, "all processes ended")
        eventually(lambda: abandoned() <= before, PATIENCE_S, "its shared memory given back")


@pytest.mark.deep
def test_down_and_up_again_and_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    with small(tmp_path) as relay:
        second = relay.baton("up", "--detach")
        assert second.returncode == 1
        assert "already running" in second.stderr
        everyone = all_of(relay)
        assert relay.baton("down").returncode == 0
        assert not any(map(state.alive, everyone))
    with small(tmp_path) as again:
        assert len(again.generate(PROMPT, options(max_tokens=8)).token_ids[0]) == 8
        victim = again.processes("decode")[0]
        again.kill(victim)
        again.wait_for_all(gone=victim["pid"])
        assert len(again.generate(PROMPT, options(max_tokens=8)).token_ids[0]) == 8
