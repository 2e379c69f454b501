"""Turn 2 of a conversation whose worker is full runs on another one, which collects turn 1."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.relay import PATIENCE_S, Answer, Relay, eventually, options, until_it_comes_about
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
FIRST, OUTPUT = 300, 100
BLOCK = 16


@pytest.fixture(scope="module")
def network() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two decode workers with one place each, which prefill by themselves."""
    folder = tmp_path_factory.mktemp("prefixes")
    environment = {
        "BATON_COLLECT_PREFIX_TOKENS": "64",
        "BATON_LOCAL_PREFILL_TOKENS": "100000",
        "BATON_MAX_RUNNING": "1",
    }
    running = Relay(folder, "--model", str(BUNDLED), "--decode", "2", environment=environment)
    yield running
    running.close()


@dataclass
class Conversation:
    """After turn 1, while something else runs on its worker."""

    second: list[int]
    """The prompt of turn 2."""
    expected: list[int]
    has_it: dict[str, Any]
    needs_it: dict[str, Any]
    beside: Any
    """The stream that fills the worker which has turn 1."""


def after_turn_1(relay: Relay, network: Any, number: int) -> Conversation:
    relay.wait_for_all()
    prompt = [60 + (number * 7 + i) % 400 for i in range(FIRST)]
    first = relay.generate(prompt, options(max_tokens=OUTPUT))
    expected = greedy_tokens(network, prompt, OUTPUT)
    assert first.token_ids[0] == expected
    second = [*prompt, *expected, *range(70, 100)]
    # It begins alike, so that it goes where turn 1 is.
    beside = relay.stream([*prompt, 70], options(max_tokens=1500))
    for _ in range(3):
        next(beside)
    has_it = relay.busiest("decode")
    (needs_it,) = (p for p in relay.processes("decode") if p["pid"] != has_it["pid"])
    return Conversation(second, greedy_tokens(network, second, 20), has_it, needs_it, beside)


def asked(relay: Relay, prompt: list[int]) -> Answer:
    return relay.generate(prompt, options(max_tokens=20))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_turn_2_on_another_worker_computes_only_the_rest(pair: Relay, network: Any) -> None:
    tries = iter(range(100))

    def collected() -> bool:
        talk = after_turn_1(pair, network, next(tries))
        here = talk.needs_it
        tokens = pair.metric(here, "baton_prefix_collected_tokens_total", source="decode")
        computed = pair.metric(here, "baton_prefill_tokens_total")
        answer = asked(pair, talk.second)
        talk.beside.cancel()
        eventually(pair.idle, PATIENCE_S, "the other stream is cancelled")
        assert answer.token_ids[0] == talk.expected
        came = pair.metric(here, "baton_prefix_collected_tokens_total", source="decode") - tokens
        if not came:
            return False
        # The newest token of turn 1 had no KV.
        assert came == (FIRST + OUTPUT - 1) // BLOCK * BLOCK
        rest = pair.metric(here, "baton_prefill_tokens_total") - computed
        assert rest == len(talk.second) - came
        assert answer.finished is not None and answer.finished.cached_tokens == came
        assert pair.metric(pair.router, "baton_prefix_tokens_total", reason="busy") >= came
        assert answer.accepted is not None
        said = pair.baton("explain", answer.accepted.request_id, "--http", pair.http)
        assert f"{came:.0f} of " in said.stdout and "tokens collected" in said.stdout
        return True

    until_it_comes_about(collected, "turn 2 runs where turn 1 did not")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_worker_with_turn_1_is_killed_meanwhile(pair: Relay, network: Any) -> None:
    talk = after_turn_1(pair, network, 50)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, pair, talk.second)
        pair.kill(talk.has_it)
        talk.beside.cancel()
        assert answer.result(PATIENCE_S).token_ids[0] == talk.expected
    pair.wait_for_all(gone=talk.has_it["pid"])
