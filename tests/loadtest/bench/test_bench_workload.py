"""Every contender gets the same requests, and those that earlier figures were measured with."""

from __future__ import annotations

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from baton_loadtest.bench.engine import OUTPUT_TOKENS, PROMPT_TOKENS
from baton_loadtest.bench.engines import EngineRequests, from_json


def test_the_default_requests_are_those_of_the_reference_measurements() -> None:
    workload = EngineRequests.draw(42, 32, PROMPT_TOKENS, OUTPUT_TOKENS, 32000)
    assert (workload.prompt_tokens, workload.output_tokens) == (7653, 4492)
    lengths = zip(workload.prompts, workload.outputs, strict=True)
    assert max(len(prompt) + output for prompt, output in lengths) == 678


@given(seed=st.integers(0, 2**32), vocab_size=st.integers(4, 40000))
def test_lengths_and_tokens_stay_within_their_bounds(seed: int, vocab_size: int) -> None:
    workload = EngineRequests.draw(seed, 5, (3, 9), (1, 4), vocab_size)
    assert all(3 <= len(prompt) <= 9 for prompt in workload.prompts)
    assert all(1 <= output <= 4 for output in workload.outputs)
    assert all(3 <= token < vocab_size for prompt in workload.prompts for token in prompt)


def test_a_workload_survives_the_way_to_a_contender() -> None:
    workload = EngineRequests.draw(1, 4, (3, 9), (1, 4), 100)
    assert from_json(json.loads(json.dumps(asdict(workload)))) == workload
