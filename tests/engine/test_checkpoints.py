"""Quantised checkpoints against transformers over the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from batonlm.engine.checkpoint import Checkpoint, UnsupportedModel, check_files, read_scheme
from batonlm.engine.config import EngineConfig
from batonlm.engine.loader import Bar, load, outline, read_onto
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import generate, random_prompts, together
from tests.engine.quantised import KINDS, change_config, write
from tests.engine.tiny_models import VOCAB

NEW = 8
DENSE = sorted(set(KINDS) - {"mxfp4"})


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


def check(quantised: Path, reference: Path) -> None:
    """Equal weights, bit for bit, and equal tokens."""
    ours = load(EngineConfig(str(quantised), device="cpu")).network.state_dict()
    theirs = load(EngineConfig(str(reference), device="cpu")).network.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    prompts = random_prompts([3, 20], VOCAB)
    runner = TorchRunner.load(EngineConfig(str(quantised), num_blocks=64, device="cpu"))
    try:
        got = generate(runner, prompts, together(2, 3), NEW)
    finally:
        runner.close()
    assert got == reference_tokens(reference, prompts)


@pytest.mark.parametrize("kind", DENSE)
def test_tokens_are_those_of_the_numbers_that_are_stored(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    check(*write(kind, saved("llama"), tmp_path))


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("gpt_oss", "mxfp4"),
        ("deepseek_v3", "fp8 by block"),
        ("qwen3_moe", "compressed w4a16"),
        ("qwen3", "awq"),
    ],
)
def test_models_of_other_forms(
    arch: str, kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    check(*write(kind, saved(arch), tmp_path))


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
