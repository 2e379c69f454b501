"""Models of each kind of layer say what transformers does on every way that a sequence takes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from served_models import small_config, tiny_model
from tests.e2e.relay import Answer, Relay, options, until_it_comes_about
from tests.e2e.streams import Asked, Following
from tests.engine.tiny_models import save_tokenizer
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

NEW_TOKENS = 100
POSITIONS = 512
"""Of those that index what they attend to, how many they choose: none is left out."""
KV_MIB = {"gemma4_text": 8}
"""Of a worker, where one is not enough for a sequence."""
SINGLY = {"jamba", "minimax"}
"""They take up a state position by position, so that such prompts are sooner computed anew."""
STEP_TOKENS = {
    kind: 37
    for kind in (
        "bamba",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "falcon_h1",
        "gemma3n_text",
        "gemma4_text",
        "glm4_moe",
        "glm_moe_dsa",
        "gpt_oss",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "llama4_text",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_next",
    )
} | {"jamba": 37, "mamba2": 512, "zamba2": 512}
"""Positions that a step computes at most, by the model's type."""
DEEP = {"qwen3_next"}
"""It keeps states beside KV, takes prompts up in chunks, and finds states in caches."""


def asked_of(count: int) -> list[Asked]:
    """Every other one asks for two choices."""
    return [
        (list(range(60 + number, 160 + number)), options(max_tokens=NEW_TOKENS, n=1 + number % 2))
        for number in range(count)
    ]


def said(relay: Relay, asked: Sequence[Asked]) -> list[list[int]]:
    """Asks all at once. Returns the tokens of each, whose choices have to agree."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: relay.generate(*one), asked))
    return [agreed(answer) for answer in answers]


def agreed(answer: Answer) -> list[int]:
    first, *others = answer.token_ids.values()
    assert all(other == first for other in others)
    return first


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.deep if kind in DEEP else pytest.mark.slow)
        for kind in STEP_TOKENS
    ],
)
def test_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Whole, computed in chunks by another worker and handed over, with two choices,
    moved to another worker while they run, and with their prompts found in caches."""
    model = tmp_path / kind
    config = small_config(kind)
    if hasattr(config, "index_topk"):
        config.index_topk = POSITIONS
    tiny_model(config).save_pretrained(model)
    save_tokenizer(model)
    asked = asked_of(12)
    kv = str(KV_MIB.get(kind, 1))
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = [greedy_tokens(network, prompt, NEW_TOKENS) for prompt, _ in asked]
    # Some layers are slow where no kernel is: on a busy machine the last would be refused.
    environment = {"BATON_STEP_TOKENS": str(STEP_TOKENS[kind]), "BATON_MAX_QUEUE_S": "120"}
    flags = ("--model", str(model), "--decode", "2", "--transport", "nixl", "--kv-memory-mib", kv)
    relay = Relay(tmp_path, *flags, environment=environment)
    try:
        relay.wait_for_all()

        def they_move() -> bool:
            streams = Following(relay, asked)
            streams.settled()
            moved = relay.metric(relay.router, "baton_moves_total", outcome="moved")
            leaving = relay.busiest("decode")
            relay.kill(leaving, signal.SIGTERM)
            assert [agreed(answer) for answer in streams.answers()] == wanted
            relay.wait_for_all(gone=leaving["pid"])
            return relay.metric(relay.router, "baton_moves_total", outcome="moved") > moved

        until_it_comes_about(they_move, "sequences on a worker that leaves")
        assert relay.metric(relay.router, "baton_kv_bytes_total") > 0
        # Twice as many sequences as before: more than the pools hold.
        assert said(relay, asked * 2) == wanted * 2
        # Alone, so that what the first one leaves in caches stays there.
        assert said(relay, asked[:1]) == wanted[:1]
        again = relay.generate(*asked[0])
        assert agreed(again) == wanted[0] and again.finished is not None
        assert (again.finished.cached_tokens > 0) == (kind not in SINGLY)
    finally:
        relay.close()
