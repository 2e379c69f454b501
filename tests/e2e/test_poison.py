"""A request that ends every worker that computes it is ended; everybody else's goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import grpc
import pytest

from tests.e2e.relay import PATIENCE_S, Answer, Relay, options

pytestmark = pytest.mark.chaos

POISON = 777
INNOCENT = 8
MAX_DEATHS = 3


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two prefill and two decode workers, all of which die of one token."""
    told = {
        "BATON_POISON_TOKEN": str(POISON),
        # When all of a role are dead, whoever has not begun waits for a process to start.
        "BATON_WAIT_TIMEOUT_S": str(PATIENCE_S),
    }
    folder: Path = tmp_path_factory.mktemp("poisoned")
    with mock.patch.dict(os.environ, told):
        running = Relay(folder, "--prefill", "2", "--decode", "2", "--runner", "fake")
    yield running
    running.close()


def prompts(first: int) -> list[list[int]]:
    return [list(range(first + number, first + number + 120)) for number in range(INNOCENT)]


class Pids:
    """All processes there ever were, seen while the context is open. A new start takes seconds."""

    def __init__(self, relay: Relay) -> None:
        self.seen: set[int] = set()
        self._relay = relay
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> Pids:
        self._note()
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._note()

    def _note(self) -> None:
        self.seen |= {process["pid"] for process in self._relay.processes()}


@pytest.mark.parametrize("length", [200, 20], ids=["on prefill", "on decode"])
def test_it_ends_within_three_deaths_and_the_others_are_exact(poisoned: Relay, length: int) -> None:
    """Innocent streams run before it comes, and others come with it and share its batches."""
    poisoned.wait_for_all()
    wanted = options(max_tokens=300)
    before, beside = prompts(100), prompts(300)
    expected = [poisoned.generate(prompt, wanted).token_ids for prompt in (*before, *beside)]
    under_way = threading.Barrier(INNOCENT + 1)

    def follow(prompt: list[int], *, early: bool) -> Answer:
        answer = Answer()
        for response in poisoned.stream(prompt, wanted):
            answer.take(response.event)
            # All tokens may come in one event, where the router has had no time.
            if early and answer.token_ids:
                under_way.wait(PATIENCE_S)
                early = False
        return answer

    with Pids(poisoned) as pids, ThreadPoolExecutor(2 * INNOCENT + 1) as pool:
        streams = [pool.submit(follow, prompt, early=True) for prompt in before]
        under_way.wait(PATIENCE_S)
        poison = pool.submit(poisoned.generate, [POISON, *range(50, 50 + length)], wanted)
        streams += [pool.submit(follow, prompt, early=False) for prompt in beside]
        with pytest.raises(grpc.RpcError) as failed:
            poison.result(PATIENCE_S)
        answers = [stream.result(PATIENCE_S).token_ids for stream in streams]
        poisoned.wait_for_all()
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION, failed.value.details()
    assert answers == expected
    dead = pids.seen - {process["pid"] for process in poisoned.processes()}
    assert 1 < len(dead) <= MAX_DEATHS
    counted = poisoned.metric(poisoned.router, "baton_requests_total", outcome="quarantined")
    assert counted == (1 if length == 200 else 2)
