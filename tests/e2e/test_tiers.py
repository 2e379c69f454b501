"""Conversations that a small pool evicts come back from host memory, by the speeds measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.relay import Relay, options
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_turns_that_were_evicted_are_brought_back(tmp_path: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    environment = {
        "BATON_PREFIX_HOST_MIB": "64",
        "BATON_LOCAL_PREFILL_TOKENS": "100000",
    }
    flags = ("--model", str(BUNDLED), "--kv-memory-mib", "6", "--max-model-len", "1024")
    relay = Relay(tmp_path, *flags, environment=environment)
    try:
        relay.wait_for_all()
        prompts = [[60 + (n * 7 + i * (n + 1)) % 400 for i in range(900)] for n in range(4)]
        expected = [greedy_tokens(network, prompt, 8) for prompt in prompts]
        for _ in range(4):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert relay.generate(prompt, options(max_tokens=8)).token_ids[0] == tokens
        # Either of them may have computed the prompts.
        workers = [*relay.processes("prefill"), *relay.processes("decode")]
        restored = sum(
            relay.metric(worker, "baton_prefix_restored_tokens_total", tier="host")
            for worker in workers
        )
        assert restored >= 640
    finally:
        relay.close()
