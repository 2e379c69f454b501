"""The fused decoder against transformers' own code: the same weights, inputs and attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine import runner as runner_module
from batonlm.engine.attention.backends import open_backend
from batonlm.engine.config import EngineConfig
from batonlm.engine.fused.decoder import Decoder, PlainOperators, Rotation
from batonlm.engine.fused.recipe import NotCovered, Recipe, read_recipe
from batonlm.engine.loader import LoadedModel, load, probe_attention, run_network, wire
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import GREEDY, generate, random_prompts, scattered, together
from tests.engine.tiny_models import VOCAB, save_tiny_model

COVERED = (
    "llama",
    "llama_tied",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "phi3",
    "smollm3",
    "seed_oss",
)
LATE = 700
"""A position behind the original lengths of scaled rotary embeddings below."""
ORIGINAL = {"original_max_position_embeddings": 512, "rope_theta": 10000.0}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
}


def opened(folder: Path, *, device: str = "cpu", **settings: Any) -> tuple[LoadedModel, Any, Any]:
    """A wired model, its shape of attention and a backend for it."""
    config = EngineConfig(str(folder), device=device, exact=False, **settings)
    loaded = load(config)
    wire(loaded.network)
    shape = probe_attention(loaded)
    return loaded, shape, open_backend(config, loaded, shape, 300)


def steps(lengths: tuple[int, int, int], late: int) -> list[StepPlan]:
    """Three sequences: whole prompts, then tokens beside a chunk. late: where one of them goes on,
    the positions before it having no KV but zeros."""
    row = SampleRow(0, 0, 0, GREEDY)
    tables = scattered(3, 64)
    starts = (0, 0, late)
    first = random_prompts(lengths, VOCAB)
    second = random_prompts((1, 9, 1), VOCAB, seed=2)
    return [
        StepPlan(
            number,
            tuple(
                Chunk(i, tokens, starts[i] + number * lengths[i], tables[i], (row,))
                for i, tokens in enumerate(prompts)
            ),
        )
        for number, prompts in enumerate((first, second))
    ]


@torch.inference_mode()
def check(folder: Path, **settings: Any) -> None:
    """With torch's operators."""
    loaded, shape, backend = opened(folder, **settings)
    plans = steps((1, 40, 25), LATE)
    wanted = [run_network(loaded.network, backend.begin(plan)) for plan in plans]
    recipe = read_recipe(loaded.network, shape.layers)
    decoder = Decoder(loaded.network, recipe, PlainOperators(recipe))
    for plan, logits in zip(plans, wanted, strict=True):
        got = run_network(decoder, backend.begin(plan))
        torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
        # And the network that shares its weights still is what it was.
        again = run_network(loaded.network, backend.begin(plan))
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", COVERED)
def test_logits_equal_those_of_transformers(arch: str, saved: Callable[[str], Path]) -> None:
    check(saved(arch))


@pytest.mark.parametrize("rope", ROPES)
def test_so_they_do_with_scaled_rotary_embeddings(rope: str, tmp_path: Path) -> None:
    check(save_tiny_model("llama", tmp_path / rope, rope_parameters=ROPES[rope]))


def test_a_part_of_a_head_may_turn(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    check(save_tiny_model("phi3", tmp_path / "part", rope_parameters=rope))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt_oss"])
@torch.inference_mode()
def test_half_precision_is_as_near_to_float32_as_that_of_transformers(
    arch: str, saved: Callable[[str], Path]
) -> None:
    """Sums that are rounded elsewhere make logits differ by more than either differs in the mean,
    and may choose another expert."""
    exact, _, exact_backend = opened(saved(arch))
    loaded, shape, backend = opened(saved(arch), dtype="bfloat16")
    recipe = read_recipe(loaded.network, shape.layers)
    decoder = Decoder(loaded.network, recipe, PlainOperators(recipe))
    plans = steps((1, 40, 25), LATE)
    wanted = [run_network(exact.network, exact_backend.begin(plan)) for plan in plans]
    theirs, ours = (
        torch.cat(
            [
                run_network(network, backend.begin(plan)).float() - logits
                for plan, logits in zip(plans, wanted, strict=True)
            ]
        )
        for network in (loaded.network, decoder)
    )
    assert ours.square().mean().sqrt() < 1.25 * theirs.square().mean().sqrt()


def test_merged_weights_are_in_memory_once(saved: Callable[[str], Path]) -> None:
    loaded, shape, _ = opened(saved("qwen2"))
    before = sum(weight.nbytes for weight in loaded.network.parameters())
    recipe = read_recipe(loaded.network, shape.layers)
    decoder = Decoder(loaded.network, recipe, PlainOperators(recipe))
    weights = {*decoder.parameters(), *loaded.network.parameters()}
    storages = {weight.untyped_storage().data_ptr(): weight for weight in weights}
    assert sum(weight.untyped_storage().nbytes() for weight in storages.values()) == before


def reason(folder: Path) -> str:
    loaded, shape, _ = opened(folder)
    with pytest.raises(NotCovered) as caught:
        read_recipe(loaded.network, shape.layers)
    return str(caught.value)


@pytest.mark.parametrize("arch", ["gemma2", "olmo2", "deepseek_v3"])
def test_other_types_are_not_covered(arch: str, saved: Callable[[str], Path]) -> None:
    assert reason(saved(arch)) == f"models of type {arch} have no recipe"


def test_other_forms_of_a_covered_type_are_not(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "gelu", hidden_act="gelu")
    assert reason(folder) == "its activation is gelu"
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = save_tiny_model("llama", tmp_path / "dynamic", rope_parameters=dynamic)
    assert reason(folder) == "rotary embeddings of type dynamic have no recipe"


def test_a_weight_without_a_use_is_not_covered(saved: Callable[[str], Path]) -> None:
    loaded, shape, _ = opened(saved("llama"))
    layer: Any = loaded.network.model.layers[1]  # type: ignore[union-attr,index]
    layer.self_attn.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(NotCovered, match=r"self_attn\.temperature that the recipe does not use"):
        read_recipe(loaded.network, shape.layers)


def tokens(runner: TorchRunner) -> list[list[int]]:
    prompts = random_prompts((5, 30), VOCAB)
    found = generate(runner, prompts, together(2, 4), 8)
    runner.close()
    return found


def test_a_decoder_that_is_wrong_is_not_used(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(saved("llama"))
    own = TorchRunner.load(EngineConfig(folder, num_blocks=8, decoder="transformers"))
    wanted = tokens(own)
    with caplog.at_level(logging.INFO):
        assert tokens(TorchRunner.load(EngineConfig(folder, num_blocks=8))) == wanted
    assert "decoder: fused" in caplog.messages
    assert "not used" not in caplog.text
    monkeypatch.setattr(PlainOperators, "gate", lambda self, merged: merged.chunk(2, -1)[0])
    assert tokens(TorchRunner.load(EngineConfig(folder, num_blocks=8))) == wanted
    assert "the fused decoder is wrong here, and is not used: packed prompts" in caplog.text


def _at_layer_1(recipe: Recipe, **changes: Any) -> Recipe:
    layers = list(recipe.attention)
    layers[1] = replace(layers[1], **changes)
    return replace(recipe, attention=tuple(layers))


def _mixture(recipe: Recipe, **changes: Any) -> Recipe:
    assert recipe.mixture is not None
    return replace(recipe, mixture=replace(recipe.mixture, **changes))


def deep(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.deep)


WRONG = [
    ("llama", "epsilon", lambda recipe: replace(recipe, epsilon=1e-3)),
    ("mistral", "window", lambda recipe: _at_layer_1(recipe, window=23)),
    ("gpt_oss", "one expert", lambda recipe: _mixture(recipe, choices=1)),
    deep("llama", "scale", lambda recipe: _at_layer_1(recipe, scale=0.24)),
    deep("mistral", "no window", lambda recipe: _at_layer_1(recipe, window=None)),
    deep("gpt_oss", "no sinks", lambda recipe: _at_layer_1(recipe, sinks=None)),
    deep("llama", "no turn", lambda recipe: replace(recipe, rotates=(True, False, True))),
    deep("qwen3_moe", "shares", lambda recipe: _mixture(recipe, normalised=False)),
]
"""Of one layer, or as small as a wrong default would be."""


@pytest.mark.parametrize("arch, what, change", WRONG)
def test_the_check_at_load_finds_a_wrong_recipe(
    arch: str,
    what: str,
    change: Callable[[Recipe], Recipe],
    saved: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        runner_module, "read_recipe", lambda *arguments: change(read_recipe(*arguments))
    )
    TorchRunner.load(EngineConfig(str(saved(arch)), num_blocks=8)).close()
    assert "the fused decoder is wrong here, and is not used" in caplog.text


@pytest.mark.deep
@pytest.mark.parametrize("halves", ["swapped", "turned back"])
def test_so_it_does_wrong_halves(
    halves: str,
    saved: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, turn = PlainOperators.gate, Rotation.of

    def swapped(self: PlainOperators, merged: torch.Tensor) -> torch.Tensor:
        return gate(self, merged.roll(merged.shape[-1] // 2, -1))

    def turned_back(*inputs: Any) -> Rotation:
        right = turn(*inputs)
        return replace(right, sines=-right.sines)

    if halves == "swapped":
        monkeypatch.setattr(PlainOperators, "gate", swapped)
    else:
        monkeypatch.setattr(Rotation, "of", turned_back)
    TorchRunner.load(EngineConfig(str(saved("qwen3")), num_blocks=8)).close()
    assert "the fused decoder is wrong here, and is not used" in caplog.text
