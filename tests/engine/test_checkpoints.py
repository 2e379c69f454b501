"""Quantised checkpoints against transformers over the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from baton_loadtest.quantised import E2M1, KINDS, change_config, write
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine import kept
from batonlm.engine.checkpoint import (
    Checkpoint,
    Numbers,
    UnsupportedModel,
    check_files,
    read_scheme,
)
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee, weights_bytes
from batonlm.engine.kept import KeptLinear, KeptStack, KeptWeight, NotKept, kept_in, stacks_of
from batonlm.engine.loader import Bar, load, outline, read_onto
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import GREEDY, generate, random_prompts, scattered, together
from tests.engine.machine import needs_int8
from tests.engine.tiny_models import VOCAB

NEW = 8
DENSE = sorted(name for name, kind in KINDS.items() if kind.of_layers)
OFTEN = {"awq", "gptq", "fp8 by block", "compressed int8", "compressed w4a16"}
"""Of the default tests: one of each family, and numbers of each size."""


def reference_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        own = network.generate(
            given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        answers.append(own[0, len(prompt) :].tolist())
    return answers


def check(quantised: Path, reference: Path, *, kept: int) -> None:
    """Equal weights, bit for bit, and equal tokens, whatever a step is made of. kept: how many
    matrices stay quantised."""
    loaded = load(EngineConfig(str(quantised), device="cpu")).network
    ours = loaded.state_dict()
    assert len(kept_in(loaded)) == kept
    theirs = load(EngineConfig(str(reference), device="cpu")).network.state_dict()
    for prefix, module in loaded.named_modules():
        if isinstance(module, KeptLinear):
            ours[f"{prefix}.weight"] = module.kept.dense()
        for name, stack in stacks_of(module).items():
            ours[f"{prefix}.{name}"] = torch.stack([stack[i] for i in range(stack.shape[0])])
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    prompts = random_prompts([3, 20], VOCAB)
    runner = TorchRunner.load(EngineConfig(str(quantised), num_blocks=64, device="cpu"))
    try:
        assert runner.exact, runner.not_exact_because
        got = generate(runner, prompts, together(2, 3), NEW)
        assert generate(runner, prompts[1:], scattered(1, 3), NEW, chunk=6) == got[1:]
    finally:
        runner.close()
    assert got == reference_tokens(reference, prompts)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.deep) for kind in DENSE],
)
def test_tokens_are_those_of_the_numbers_that_are_stored(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    check(*write(kind, saved("llama"), tmp_path), kept=21)


@pytest.mark.parametrize("kind", ["awq", "fp8 by block", "compressed int8"])
def test_weights_that_are_kept_take_what_they_take_in_files(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """The plan of memory has the same sum before a weight is read and after."""
    quantised, reference = write(kind, saved("llama"), tmp_path)
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(str(quantised), dtype=dtype, device="cpu")
        loaded = load(config)
        device, network = loaded.device, loaded.network
        wide = load(replace(config, model=str(reference))).network
        taken = weights_bytes(network, device, "none")
        assert foresee(config).memory.weights_bytes == taken
        layers = [each for each in network.modules() if isinstance(each, KeptLinear)]
        assert len(layers) == 21
        kept = sum(layer.kept.num_bytes for layer in layers)
        numbers = sum(layer.in_features * layer.out_features for layer in layers)
        dense = numbers * (4 if dtype == "float32" else 2)
        assert weights_bytes(wide, device, "none") - taken == dense - kept
        # Scales of groups of 32 numbers, and zeros, are the rest.
        assert 0.5 * numbers <= kept <= (0.65 if kind == "awq" else 1.13) * numbers


@pytest.mark.deep
@pytest.mark.parametrize(
    "kind", [*(kind for kind in DENSE if "fp8" not in kind), "fp8 by block", "fp8 by tensor"]
)
def test_in_bfloat16_rows_do_not_change_with_their_neighbours(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    quantised, reference = write(kind, saved("qwen3"), tmp_path)
    config = EngineConfig(str(quantised), num_blocks=64, dtype="bfloat16", device="cpu")
    runner = TorchRunner.load(config)
    plain = TorchRunner.load(replace(config, model=str(reference)))
    prompts = random_prompts([3, 40, 17], VOCAB)
    try:
        assert runner.exact, runner.not_exact_because
        wanted = [generate(runner, [prompt], together(1, 5), NEW)[0] for prompt in prompts]
        assert generate(runner, prompts, scattered(3, 5), NEW, chunk=7) == wanted
        plan = StepPlan(0, (Chunk(0, prompts[1], 0, ((0, 3),), (SampleRow(0, 0, 0, GREEDY),)),))
        one, other = (each.forward(plan)[0].float().clone() for each in (runner, plain))
        assert float((one - other).norm() / other.norm()) < 0.05
    finally:
        runner.close()
        plain.close()


@needs_int8
def test_codes_of_8_bits_are_not_rounded_again(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """--quantize int8 rounds activations, and weights by output are what they are stored as."""
    quantised, reference = write("compressed int8", saved("llama"), tmp_path)
    config = EngineConfig(str(quantised), num_blocks=64, quantize="int8", exact=False, device="cpu")
    assert any(isinstance(each, KeptLinear) for each in load(config).network.modules())
    prompt = random_prompts([30], VOCAB)[0]
    plan = StepPlan(0, (Chunk(0, prompt, 0, ((0, 2),), (SampleRow(0, 0, 0, GREEDY),)),))
    rows, digests = [], []
    for given in (config, replace(config, model=str(reference)), replace(config, quantize="none")):
        runner = TorchRunner.load(given)
        rows.append(runner.forward(plan)[0].clone())
        digests.append(runner.model.digest)
        runner.close()
    kept, rounded, exact = rows
    assert digests[0] == f"{digests[2]}-int8"
    assert float((kept - exact).norm()) > 0
    assert float((kept - rounded).norm() / rounded.norm()) < 1e-3


def test_what_cannot_be_kept_is_dequantised_and_said(
    saved: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = write("compressed w4a16 in order of activations", saved("llama"), tmp_path)
    file = quantised / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    # One input moves from its group to the next, so that groups are of several sizes.
    order = stored[f"{name}.weight_g_idx"]
    order[int((order == 0).nonzero()[0])] = 1
    save_file(stored, file, {"format": "pt"})
    with caplog.at_level("INFO", "batonlm.engine.loader"):
        network = load(EngineConfig(str(quantised), device="cpu")).network
    assert type(network.get_submodule(name)) is nn.Linear
    assert "1 quantised weights are dequantised: its groups of inputs are of several" in caplog.text
    kept = [each for each in network.modules() if isinstance(each, KeptLinear)]
    assert len(kept) == 20
    assert "of weights as stored (20 int4)" in caplog.text


@pytest.mark.parametrize(
    ("arch", "kind", "kept"),
    [
        ("gpt_oss", "mxfp4", 24),
        ("deepseek_v3", "fp8 by block", 0),
        ("qwen3_moe", "compressed w4a16", 0),
        ("qwen3", "awq", 21),
        ("phi3", "gptq in order of activations", 12),
        ("gemma3", "fp8 by block", 49),
    ],
)
def test_models_of_other_forms(
    arch: str, kind: str, kept: int, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Packed experts are kept; those that files have one by one are dequantised, and with them all
    of their model."""
    check(*write(kind, saved(arch), tmp_path), kept=kept)


def mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> Numbers:
    scales = torch.exp2(exponents.float())
    return Numbers(codes, scales, bits=4, group=32, transposed=True, is_e2m1=True)


def test_every_number_of_mxfp4_is_kept_as_it_is() -> None:
    """Under every scale that leaves float32 a number, down to those without a leading one."""
    exponents = torch.arange(-127, 2)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, len(exponents), 2)
    numbers = mxfp4(codes, exponents.view(1, -1, 1).expand(2, -1, -1))
    stack = KeptStack.of(numbers, torch.float32)
    wanted = torch.tensor([*E2M1, *(-number for number in E2M1)]).repeat(2)
    for expert in range(2):
        found = stack[expert].t()
        assert torch.equal(found, wanted * torch.exp2(exponents.float())[:, None])
        assert torch.equal(found.signbit(), wanted.signbit().expand_as(found))
    assert torch.equal(torch.stack([stack[0], stack[1]]).mT, numbers.dense(torch.float32).mT)
    with pytest.raises(NotKept, match="large"):
        KeptStack.of(mxfp4(codes[:, :1], torch.full((2, 1, 1), 2)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "fp4"])
def test_a_weight_of_several_tiles_is_the_weight(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TILE_NUMBERS", 2048)
    codes, scales = torch.randint(-8, 8, (160, 64), dtype=torch.int8), torch.rand(160, 1)
    numbers = {
        "int8": Numbers(codes, scales),
        "int4": Numbers(codes, scales, bits=4),
        "fp8": Numbers(codes.to(torch.float8_e4m3fn), scales),
        "fp4": Numbers((codes + 8).byte(), torch.exp2(codes[:, :1] - 8.0), bits=4, is_e2m1=True),
    }[form]
    weight = KeptWeight.of(numbers, dtype)
    assert weight.kind == form and len(weight.tiles) > 2
    assert torch.equal(weight.dense(), numbers.dense(dtype))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_four_bits(
    dtype: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    quantised, reference = write("mxfp4", saved("gpt_oss"), tmp_path)
    config = EngineConfig(str(quantised), num_blocks=64, dtype=dtype, device="cpu")
    loaded = load(config)
    taken = weights_bytes(loaded.network, loaded.device, "none")
    assert foresee(config).memory.weights_bytes == taken
    wide = load(replace(config, model=str(reference)))
    shapes = [weight.shape for weight in kept_in(loaded.network)]
    assert len(shapes) == 24
    numbers = sum(outputs * inputs for outputs, inputs in shapes)
    dense = numbers * (4 if dtype == "float32" else 2)
    # 4 bits, and a scale of 16 for 32 numbers.
    assert weights_bytes(wide.network, wide.device, "none") - taken == dense - numbers * 9 // 16
    runner = TorchRunner.load(config)
    prompts = random_prompts([3, 40, 17], VOCAB)
    try:
        assert runner.exact, runner.not_exact_because
        wanted = [generate(runner, [prompt], together(1, 5), NEW)[0] for prompt in prompts]
        assert generate(runner, prompts, scattered(3, 5), NEW, chunk=7) == wanted
    finally:
        runner.close()


@pytest.mark.parametrize("kind", ["awq", "fp8 by block"])
def test_weights_read_onto_a_device_are_the_same(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    quantised, reference = write(kind, saved("llama"), tmp_path)
    wanted = load(EngineConfig(str(reference), device="cpu"))
    settings = transformers.AutoConfig.from_pretrained(quantised)
    files = Checkpoint(quantised, tuple(check_files(quantised)), read_scheme(settings))
    given = torch.device("cpu"), type(wanted.network), files, settings, torch.float32
    network = read_onto(*given, Bar(None, 0))
    assert network is not None
    for name, weight in wanted.network.state_dict().items():
        assert torch.equal(network.state_dict()[name], weight)


REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq with 3 bits": {"quant_method": "gptq", "bits": 3},
    "layout marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "layout gemv": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    "format nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
    },
    "type float and 4 bits": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
    },
    "sparse weights": {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "numbers of format e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
}


@pytest.mark.parametrize("why", sorted(REFUSED))
def test_other_formats_are_refused_by_name_before_weights_are_read(
    why: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, _ = write("awq", saved("llama"), tmp_path)
    change_config(folder, quantization_config=REFUSED[why])
    config = EngineConfig(str(folder), device="cpu")
    for refuse in (outline, lambda given: load(given, lambda done, total: pytest.fail("read"))):
        with pytest.raises(UnsupportedModel) as caught:
            refuse(config)
        assert REFUSED[why]["quant_method"] in caught.value.message
        assert all(word in caught.value.message for word in why.split())
        assert "--quantize" in caught.value.message


def test_parts_that_do_not_fit_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder, _ = write("awq", saved("llama"), tmp_path)
    file = folder / "model.safetensors"
    whole = load_file(file)
    part = next(name for name in whole if name.endswith("qzeros"))

    def refusal(changed: dict[str, torch.Tensor], **given: Any) -> str:
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(UnsupportedModel) as caught:
            load(EngineConfig(str(folder), device="cpu"), **given)
        return caught.value.message

    unread = {"progress": lambda done, total: pytest.fail("weights were read")}
    own = part.replace("qzeros", "scales")
    assert own in refusal({n: t for n, t in whole.items() if n != own}, **unread)
    odd = "model.layers.0.self_attn.q_proj"
    plain = {n: t for n, t in whole.items() if not n.startswith(odd)}
    plain[f"{odd}.weight"] = torch.zeros(64, 64, dtype=torch.int8)
    assert f"{odd}.weight" in refusal(plain, **unread)
    del plain[f"{odd}.weight"]
    assert "lacks weights" in refusal(plain)
    assert "do not fit" in refusal({**whole, part: whole[part][:1]})
