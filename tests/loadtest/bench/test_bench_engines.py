"""Models, requests, the engine in this process, and its single steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from baton_loadtest.bench import engines
from baton_loadtest.bench.engine import OUTPUT_TOKENS, PROMPT_TOKENS
from baton_loadtest.bench.engines import (
    EngineRequests,
    StepTimer,
    engine_loop,
    from_json,
    policy,
    serve,
)
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.scheduler.plan import StepPlan
from batonlm.testing.fake_runner import FakeRunner


@pytest.mark.parametrize(("tied", "expected"), [(True, 10 * 4 + 4), (False, 4 + 10 * 4)])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(
    tied: bool, expected: int, tmp_path: Path
) -> None:
    weights = {"model.embed_tokens.weight": torch.zeros(10, 4), "model.norm.weight": torch.zeros(4)}
    if not tied:
        weights["lm_head.weight"] = torch.zeros(10, 4)
    save_file(weights, tmp_path / "model.safetensors")
    assert engines.weights_read(tmp_path, {"tie_word_embeddings": tied}) == expected


def test_kv_of_the_100m_shape() -> None:
    assert engines.kv_bytes(engines.SHAPES["100m"]) == 2 * 12 * 4 * 64 * 4
    assert engines.kv_bytes(engines.SHAPES["500m"]) == 2 * 28 * 8 * 128 * 4


def test_any_models_folder_is_a_shape(tmp_path: Path) -> None:
    assert engines.folder(str(tmp_path)) == tmp_path
    with pytest.raises(InvalidArgument):
        engines.folder("no-such-shape")


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


REQUESTS = EngineRequests.draw(3, 7, (4, 60), (2, 20), 2048)
AT_ONCE = 3


def _runner(poison: int | None = None) -> FakeRunner:
    blocks = REQUESTS.positions(AT_ONCE) // 16
    return FakeRunner(num_blocks=blocks, block_size=16, poison_token_id=poison)


def test_both_ways_give_every_token_and_the_same() -> None:
    runner = _runner()
    rules = policy(AT_ONCE, 64)
    ours = serve(engine_loop(runner, rules), REQUESTS)
    batches = [range(3), range(3, 6), range(6, 7)]
    static = serve(engine_loop(runner, rules), REQUESTS, batches)
    assert [len(tokens) for tokens in ours.tokens] == list(REQUESTS.outputs)
    assert static.tokens == ours.tokens
    for served in (ours, static):
        assert sum(served.occupancy) == REQUESTS.output_tokens
        assert max(served.occupancy) == AT_ONCE
    assert len(static.occupancy) > len(ours.occupancy)


def test_a_request_that_fails_fails_the_benchmark() -> None:
    runner = _runner(poison=REQUESTS.prompts[0][-1])
    with pytest.raises(BatonError):
        serve(engine_loop(runner, policy(AT_ONCE, 64)), REQUESTS)


class _Watched(FakeRunner):
    """Keeps the plans it is given."""

    def __init__(self) -> None:
        super().__init__(num_blocks=20, block_size=16)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


def test_all_memory_is_written_first() -> None:
    runner = _Watched()
    StepTimer(runner)
    positions = 20 * 16
    out = memoryview(bytearray(positions * runner.layout.bytes_per_position))
    runner.pack(((0, 20),), 0, positions, out)
    size = runner.layout.bytes_per_position
    never_written = b"\xff" * size
    assert all(out[i : i + size] != never_written for i in range(0, len(out), size))


def test_a_decode_step_gives_every_sequence_its_own_context() -> None:
    runner = _Watched()
    timer = StepTimer(runner)
    assert timer.decode(4, 64, least=2, seconds=0.0) > 0
    for plan in runner.plans:
        assert [chunk.first_position for chunk in plan.chunks] == [64] * 4
        assert [len(chunk.token_ids) for chunk in plan.chunks] == [1] * 4
    assert len(runner.plans) == 3


def test_a_prompt_is_computed_whole_and_sampled_once() -> None:
    runner = _Watched()
    timer = StepTimer(runner)
    timer.prefill(100, 48)
    spans = [(p.chunks[0].first_position, p.chunks[0].end_position) for p in runner.plans]
    assert spans == [(0, 48), (48, 96), (96, 100)]
    assert [len(p.chunks[0].samples) for p in runner.plans] == [0, 0, 1]


def test_what_does_not_fit_is_known() -> None:
    timer = StepTimer(_Watched())
    assert timer.fits(4, 79)
    assert not timer.fits(4, 80)
    assert not timer.fits(1, 2048)
