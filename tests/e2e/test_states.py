"""Real processes of models that keep a state, and of the fake runner that stands for one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonlm import LLM
from tests.e2e.relay import Relay, until_it_comes_about
from tests.e2e.streams import Following, requests, undisturbed
from tests.engine.tiny_models import save_tiny_model
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

STATE = 100
"""Positions: blocks and a part of one."""


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_streams_move_with_their_states_when_a_decode_worker_drains(tmp_path: Path) -> None:
    asked = requests()
    environment = {"BATON_FAKE_STEP_MS": "5", "BATON_FAKE_STATE_POSITIONS": str(STATE)}
    relay = Relay(tmp_path, "--runner", "fake", "--decode", "2", environment=environment)
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
        for worker in relay.processes("prefill"):
            assert relay.metric(worker, "baton_cached_tokens_total") > 0
    finally:
        relay.close()


def transformers_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return greedy_tokens(network, prompt, count)


@pytest.mark.deep
def test_real_states_in_one_process(tmp_path: Path) -> None:
    """Of more sequences than the pool holds."""
    model = save_tiny_model("lfm2", tmp_path / "lfm2")
    asked = [list(range(60 + number, 260 + number)) for number in range(12)]
    wanted = [transformers_tokens(model, prompt, 40) for prompt in asked]
    with LLM(str(model), kv_memory_mib=1, threads=1, step_tokens=37) as llm:
        answers = llm.generate(asked, max_tokens=40, temperature=0.0, ignore_eos=True, n=2)
    for answer, tokens in zip(answers, wanted, strict=True):
        assert [list(choice.token_ids) for choice in answer.choices] == [tokens] * 2
