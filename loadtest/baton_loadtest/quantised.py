"""Writes quantised checkpoints as the tools do whose formats they are, from a plain one.

Beside each is written, not quantised, what its numbers stand for: the reference. Both are made here
from the same codes, scales and zeros, bit by bit and without Baton's reader. Numbers are rounded to
the nearest: what those tools learn from samples of text only makes other codes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
BLOCK = (48, 32)


@dataclass
class Made:
    """One quantised weight."""

    parts: dict[str, torch.Tensor]
    """Stored tensors, by what follows the module's name, or the weight's own name after "="."""
    means: torch.Tensor
    """float32, as the weight it was made from."""


@dataclass(frozen=True)
class Kind:
    config: dict[str, Any]
    """`quantization_config` of config.json."""
    make: Callable[[torch.Tensor], Made]
    only: str = "_proj.weight"
    """Ends of names of weights that are quantised."""
    skips: tuple[str, ...] = ("kv_b_proj", "mlp.gate.")
    of_layers: bool = True
    """Whether these are weights of linear layers; otherwise of experts."""


def _groups(
    weight: torch.Tensor, bits: int, order: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [outputs, inputs], scales and zeros [outputs, groups], and what they stand for."""
    outputs, inputs = weight.shape
    most = (1 << bits) - 1
    codes = torch.zeros(outputs, inputs, dtype=torch.int64)
    means = torch.zeros(outputs, inputs)
    count = int(order.max()) + 1
    scales, zeros = torch.zeros(outputs, count), torch.zeros(outputs, count, dtype=torch.int64)
    for group in range(count):
        mine = order == group
        part = weight[:, mine]
        if symmetric:
            scale = (part.abs().amax(1) / (most // 2)).half().float()
            zero = torch.full((outputs,), (most + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).half().float()
            zero = (-low / scale).round().long().clamp(0, most)
        code = ((part / scale[:, None]).round().long() + zero[:, None]).clamp(0, most)
        codes[:, mine], scales[:, group], zeros[:, group] = code, scale, zero
        means[:, mine] = (code - zero[:, None]).float() * scale[:, None]
    return codes, scales, zeros, means


def _pack(codes: torch.Tensor, bits: int, lanes: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, codes] -> int32 [rows, words]; lanes: which of a word's codes is in which place."""
    per_word = 32 // bits
    lanes = lanes or tuple(range(per_word))
    rows, count = codes.shape
    words = -(-count // per_word)
    whole = torch.zeros(rows, words * per_word, dtype=torch.int64)
    whole[:, :count] = codes
    packed = torch.zeros(rows, words, dtype=torch.int64)
    for place, lane in enumerate(lanes):
        packed |= whole.view(rows, words, per_word)[:, :, lane] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def _side_by_side(inputs: int, group: int = GROUP) -> torch.Tensor:
    return torch.arange(inputs) // group


def _shuffled(inputs: int) -> torch.Tensor:
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return _side_by_side(inputs)[order]


def _gptq(bits: int, *, symmetric: bool, shuffled: bool, offset: int) -> Callable[..., Made]:
    def make(weight: torch.Tensor) -> Made:
        inputs = weight.shape[1]
        order = _shuffled(inputs) if shuffled else _side_by_side(inputs)
        codes, scales, zeros, means = _groups(weight, bits, order, symmetric=symmetric)
        stored = (zeros - offset) & ((1 << bits) - 1)
        parts = {
            "qweight": _pack(codes, bits).t(),
            "qzeros": _pack(stored.t(), bits),
            "scales": scales.t().half(),
            "g_idx": order.int(),
        }
        return Made(parts, means)

    return make


def _awq(weight: torch.Tensor) -> Made:
    order = _side_by_side(weight.shape[1])
    codes, scales, zeros, means = _groups(weight, 4, order, symmetric=False)
    lanes = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": _pack(codes.t(), 4, lanes),
        "qzeros": _pack(zeros.t(), 4, lanes),
        "scales": scales.t().half(),
    }
    return Made(parts, means)


def _packed(bits: int, *, symmetric: bool, shuffled: bool = False) -> Callable[..., Made]:
    def make(weight: torch.Tensor) -> Made:
        inputs = weight.shape[1]
        order = _shuffled(inputs) if shuffled else _side_by_side(inputs)
        codes, scales, zeros, means = _groups(weight, bits, order, symmetric=symmetric)
        parts = {
            "weight_packed": _pack(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = _pack(zeros.t(), bits).t()
        if shuffled:
            parts["weight_g_idx"] = order.int()
        return Made(parts, means)

    return make


def _int8(weight: torch.Tensor) -> Made:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return Made({"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def _fp8(weight: torch.Tensor, scale: torch.Tensor, name: str, **more: torch.Tensor) -> Made:
    """scale: one for each weight."""
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return Made({"weight": codes, name: more["stored"]}, codes.float() * scale)


def _fp8_by_tensor(weight: torch.Tensor) -> Made:
    scale = weight.abs().amax() / 448
    made = _fp8(weight, scale, "weight_scale", stored=scale[None])
    made.parts["input_scale"] = torch.ones(1)
    return made


def _fp8_by_output(weight: torch.Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return _fp8(weight, scale, "weight_scale", stored=scale)


def _fp8_by_block(weight: torch.Tensor) -> Made:
    outputs, inputs = weight.shape
    rows, columns = BLOCK
    scales = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    spread = torch.zeros(outputs, inputs)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[here].abs().amax() / 448
            spread[here] = scales[i, j]
    return _fp8(weight, spread, "weight_scale_inv", stored=scales)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _mxfp4(weight: torch.Tensor) -> Made:
    """Of GPT-OSS, [experts, inputs, outputs]."""
    by_output = weight.transpose(1, 2).contiguous()
    experts, outputs, inputs = by_output.shape
    blocks = by_output.view(experts, outputs, inputs // 32, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / torch.exp2(exponents)[..., None]
    numbers = torch.tensor(E2M1)
    codes = (scaled.abs()[..., None] - numbers).abs().argmin(-1)
    means = numbers[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    codes = codes + 8 * (scaled < 0)
    parts = {
        "=_blocks": (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8),
        "=_scales": (exponents + 127).to(torch.uint8),
    }
    return Made(parts, means.view(experts, outputs, inputs).transpose(1, 2).contiguous())


def _of_groups(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


KINDS = {
    "fp8 by block": Kind(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}, _fp8_by_block
    ),
    "fp8 by tensor": Kind({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_by_tensor),
    "compressed fp8 by output": Kind(
        {**_of_groups(num_bits=8, type="float", strategy="channel"), "format": "float-quantized"},
        _fp8_by_output,
    ),
    "compressed int8": Kind(
        {**_of_groups(num_bits=8, type="int", strategy="channel"), "format": "int-quantized"}, _int8
    ),
    "compressed w8a16": Kind(
        {**_of_groups(num_bits=8, type="int", strategy="group"), "format": "pack-quantized"},
        _packed(8, symmetric=True),
    ),
    "compressed w4a16": Kind(
        {**_of_groups(num_bits=4, type="int", strategy="group"), "format": "pack-quantized"},
        _packed(4, symmetric=True),
    ),
    "compressed w4a16 with zeros": Kind(
        {**_of_groups(num_bits=4, type="int", strategy="group"), "format": "pack-quantized"},
        _packed(4, symmetric=False),
    ),
    "compressed w4a16 in order of activations": Kind(
        {**_of_groups(num_bits=4, type="int", actorder="group"), "format": "pack-quantized"},
        _packed(4, symmetric=True, shuffled=True),
    ),
    "awq": Kind({"quant_method": "awq", "bits": 4, "version": "gemm"}, _awq),
    "gptq": Kind(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        _gptq(4, symmetric=True, shuffled=False, offset=1),
    ),
    "gptq in order of activations": Kind(
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        _gptq(4, symmetric=False, shuffled=True, offset=1),
    ),
    "gptq of 8 bits": Kind(
        {"quant_method": "gptq", "bits": 8},
        _gptq(8, symmetric=True, shuffled=False, offset=1),
    ),
    "gptq_v2": Kind(
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        _gptq(4, symmetric=False, shuffled=False, offset=0),
    ),
    "mxfp4": Kind({"quant_method": "mxfp4"}, _mxfp4, only="_proj", of_layers=False),
}


def write(kind: str, plain: Path, folder: Path) -> tuple[Path, Path]:
    """A quantised checkpoint of a plain one, and its reference; both are made below `folder`."""
    chosen = KINDS[kind]
    quantised, reference = folder / "quantised", folder / "reference"
    shutil.copytree(plain, quantised)
    shutil.copytree(plain, reference)
    stored, means, count = {}, {}, 0
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(chosen.only) or any(each in name for each in chosen.skips):
            stored[name] = means[name] = weight
            continue
        made = chosen.make(weight)
        count += 1
        means[name] = made.means
        for part, tensor in made.parts.items():
            whole = name + part[1:] if part[0] == "=" else name.removesuffix("weight") + part
            stored[whole] = tensor.contiguous()
    if not count:
        raise ValueError(f"{plain} has no weights to quantise")
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    save_file(means, reference / "model.safetensors", {"format": "pt"})
    change_config(quantised, quantization_config=chosen.config)
    return quantised, reference


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
