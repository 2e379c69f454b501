"""Clients that leave and processes that stop: everything they held is given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from batonlm.cli import state
from tests.e2e.relay import Relay, eventually, options
from tests.shared_memory import abandoned

PROMPT = list(range(60, 460))


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


@pytest.mark.parametrize("events", [1, 2, 20])
def test_a_client_that_leaves_frees_everything(relay: Relay, events: int) -> None:
    eventually(lambda: used(relay) == 0, 10, "idle before")
    stream = relay.stream(PROMPT, options(max_tokens=1000))
    for _ in range(events):
        next(stream)
    stream.cancel()  # type: ignore[attr-defined]
    eventually(lambda: used(relay) == 0, 2, "everything freed")


def test_an_http_client_that_leaves_frees_everything(relay: Relay) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 1000,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{relay.http}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        assert used(relay) > 0
    eventually(lambda: used(relay) == 0, 2, "everything freed")


def small(folder: Path) -> Relay:
    return Relay(folder, "--runner", "fake")


def all_of(relay: Relay) -> list[dict[str, Any]]:
    """As `state.alive` takes them."""
    return [*relay.processes(), state.process(relay.supervisor)]


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_supervisor(tmp_path: Path, number: int) -> None:
    before = abandoned()
    relay = small(tmp_path)
    relay.generate(PROMPT, options(max_tokens=8))
    everyone = all_of(relay)
    os.kill(relay.supervisor, number)
    eventually(lambda: not any(map(state.alive, everyone)), 30, "all processes ended")
    eventually(lambda: abandoned() <= before, 30, "its shared memory given back")
    relay.channel.close()


@pytest.mark.deep
def test_down_and_up_again(tmp_path: Path) -> None:
    relay = small(tmp_path)
    second = relay.baton("up", "--detach")
    assert second.returncode == 1
    assert "already running" in second.stderr
    everyone = all_of(relay)
    assert relay.baton("down").returncode == 0
    assert not any(map(state.alive, everyone))
    relay.channel.close()
    again = small(tmp_path)
    assert len(again.generate(PROMPT, options(max_tokens=8)).token_ids[0]) == 8
    again.close()


@pytest.mark.deep
def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    relay = small(tmp_path)
    victim = relay.processes("decode")[0]
    relay.kill(victim)

    def back() -> bool:
        now = relay.processes("decode")[0]
        return bool(now["pid"] != victim["pid"])

    eventually(back, 30, "a new decode worker")
    assert len(relay.generate(PROMPT, options(max_tokens=8)).token_ids[0]) == 8
    relay.close()
