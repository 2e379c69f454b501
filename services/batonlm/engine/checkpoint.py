"""A model's files: which are there, and their weights as numbers, quantised or not.

Quantised checkpoints come as the hub has them: of the tools that quantise, each packs numbers,
scales and offsets in tensors of its own names. `read_scheme` says from the configuration, before a
weight is read, what a checkpoint's weights are, or refuses it by name. `Checkpoint.open` then gives
every weight under the name that the network has, as if it had never been quantised; `kept` asks
for the numbers instead.

All these formats say the same: a weight is (code - zero) * scale, where codes are small numbers,
and zeros and scales are shared by groups of codes. What differs is how they lie in files, which is
taken from what the tools write: AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, DeepSeek-V3's
repository, and OCP's Microscaling formats 1.0 for MXFP4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from batonlm.core.errors import InvalidArgument

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class UnsupportedModel(InvalidArgument):
    """The model cannot be served correctly. The message says why; field is "model"."""

    def __init__(self, message: str):
        super().__init__(message, field="model")


class Slice(Protocol):
    """A stored weight, of which only what is indexed is read. A safetensors slice is one."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """As safetensors names it, such as F32."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip


class _Outline:
    """A stored matrix on torch's meta device. Vectors, such as shapes and orders, are read."""

    def __init__(self, stored: Slice):
        self._stored = stored

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape, dtype = self.get_shape(), _DTYPES.get(self.get_dtype())
        if len(shape) < 2 or dtype is None:
            read: torch.Tensor = self._stored[index]
            return read
        return torch.empty(shape, dtype=dtype, device="meta")[index]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a checkpoint are quantised."""

    method: str
    """The name that config.json has for it."""
    zero_offset: int = 0
    """Of GPTQ: what is added to stored zeros."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where scales are of blocks."""

    def find(self, stored: Mapping[str, Slice], dtype: torch.dtype) -> dict[str, Slice]:
        """The weights under the names that a network has. Raises UnsupportedModel for weights that
        are neither of this scheme nor plain."""
        found: dict[str, Slice] = {}
        for name, part in stored.items():
            try:
                made = _made_of(self, name, stored)
            except KeyError as error:
                raise UnsupportedModel(f"{name} is stored without {error.args[0]}") from error
            if made is not None:
                whole, shape, numbers = made
                found[whole] = Quantised(whole, shape, numbers, dtype)
            elif not _is_part(name, stored):
                if name.endswith(".weight") and part.get_dtype() not in _PLAIN:
                    raise _refused(self.method, f"has {name} of an unknown form")
                found[name] = part
        return found


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, looked at before its weights are read."""

    folder: Path
    files: tuple[Path, ...]
    scheme: Scheme | None
    """None where weights are not quantised."""

    @contextmanager
    def open(self, dtype: torch.dtype, *, shapes: bool = False) -> Iterator[dict[str, Slice]]:
        """The weights by name, to be read while this is open. Those that were quantised are of
        dtype and `Quantised`; others are as they are stored. shapes: matrices have no numbers."""
        with ExitStack() as ends:
            opened = [ends.enter_context(safe_open(f, framework="pt")) for f in self.files]
            stored = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
            if shapes:
                stored = {name: _Outline(part) for name, part in stored.items()}
            yield stored if self.scheme is None else self.scheme.find(stored, dtype)


def check_files(folder: Path) -> list[Path]:
    """The weight files, each with a sound header. Raises UnsupportedModel naming what is wrong."""
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"model {folder.name} has no config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if any(found for pattern in _PICKLES for found in folder.glob(pattern)):
            raise UnsupportedModel(
                f"model {folder.name} has pickled weights only; convert them to safetensors"
            )
        raise UnsupportedModel(f"model {folder.name} has no safetensors weights")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        missing = wanted - {file.name for file in weights}
        if missing:
            raise UnsupportedModel(
                f"model {folder.name} lacks {', '.join(sorted(missing))} of its weights"
            )
    for file in weights:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise UnsupportedModel(f"weights {file.name} are corrupt or cut short") from error
    return weights


_INSTEAD = (
    "serve a checkpoint that is not quantised, with --quantize, or one in the formats fp8, "
    "compressed-tensors, gptq, awq or mxfp4"
)
_FORMATS = {"dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized"}


def read_scheme(settings: Any) -> Scheme | None:
    """The scheme that a model's configuration names; None where its weights are not quantised. It
    is taken out of the configuration, so that transformers does not look for a package for it.

    Raises UnsupportedModel, with what to use instead, for formats that are not read.
    """
    given = None
    for holder in {id(each): each for each in (settings, settings.get_text_config())}.values():
        for name in ("quantization_config", "compression_config"):
            own = getattr(holder, name, None)
            if own is not None:
                delattr(holder, name)
                given = given or own
    if given is None:
        return None
    config: dict[str, Any] = dict(given) if isinstance(given, Mapping) else given.to_dict()
    method = str(config.get("quant_method", ""))
    if method not in _CHECKS:
        raise _refused(method or "of no name", "is not read")
    return _CHECKS[method](config)


def _fp8(config: dict[str, Any]) -> Scheme:
    if str(config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fp8", f"with numbers of format {config['fmt']} is not read")
    return Scheme("fp8", block=_pair(config.get("weight_block_size")))


def _pair(sizes: Any) -> tuple[int, int] | None:
    return None if sizes is None else (int(sizes[0]), int(sizes[1]))


def _mxfp4(_config: dict[str, Any]) -> Scheme:
    return Scheme("mxfp4")


def _gptq(config: dict[str, Any]) -> Scheme:
    if config.get("bits") not in (4, 8):
        raise _refused("gptq", f"with {config.get('bits')} bits is not read")
    layout = str(config.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refused("gptq", f"in the layout {layout} is not read")
    return Scheme("gptq", zero_offset=1 if layout == "gptq" else 0)


def _awq(config: dict[str, Any]) -> Scheme:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _refused("awq", f"with {bits} bits is not read")
    layout = str(config.get("version", "gemm")).lower()
    if layout != "gemm":
        raise _refused("awq", f"in the layout {layout} is not read")
    return Scheme("awq")


def _compressed_tensors(config: dict[str, Any]) -> Scheme:
    name = "compressed-tensors"
    groups = dict(config.get("config_groups") or {}).values()
    for layout in (config.get("format"), *(group.get("format") for group in groups)):
        if layout not in (None, "mixed-precision", *_FORMATS):
            raise _refused(name, f"in the format {layout} is not read")
    sparsity = dict(config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(name, f"with sparse weights ({sparsity}) is not read")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise _refused(name, "with transforms of activations is not read")
    blocks = set()
    for group in groups:
        weights = dict(group.get("weights") or {})
        if weights.get("strategy") == "block":
            blocks.add(_pair(weights.get("block_structure")))
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if weights and (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise _refused(name, f"with weights of type {kind} and {bits} bits is not read")
        if group.get("output_activations"):
            raise _refused(name, "with quantised outputs is not read")
    if len(blocks) > 1:
        raise _refused(name, "with blocks of several sizes is not read")
    return Scheme(name, block=next(iter(blocks), None))


_CHECKS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}


def _refused(method: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"a checkpoint quantised by {method} {why}: {_INSTEAD}")


@dataclass(frozen=True, slots=True)
class Numbers:
    """A weight as a checkpoint has it: (code - zero) * scale."""

    codes: torch.Tensor
    """[..., outputs, inputs]: int8, uint8 or float8_e4m3fn."""
    scales: torch.Tensor
    """[..., outputs or 1, groups], in the type that they are stored in."""
    zeros: torch.Tensor | None = None
    """Of the type of codes, shaped as scales; None: all are 0."""
    bits: int = 8
    """Of a code."""
    group: int = 0
    """Inputs that share a scale and lie side by side, the last ones may be fewer; 0: all."""
    order: torch.Tensor | None = None
    """int64 [inputs], the group of each input, where groups do not lie side by side."""
    transposed: bool = False
    """Whether the network has inputs before outputs."""
    is_e2m1: bool = False
    """Whether codes are those of MXFP4's numbers, and not numbers themselves."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, computed in float32, one matrix after the other, so that only one of them is
        wide at a time."""
        if self.codes.dim() > 2:
            return torch.stack([matrix.dense(dtype) for matrix in self.matrices()])
        numbers = torch.tensor(_E2M1)[self.codes.int()] if self.is_e2m1 else self.codes.float()
        if self.zeros is not None:
            numbers -= self._spread(self.zeros.float())
        numbers *= self._spread(self.scales.float())
        return (numbers.t() if self.transposed else numbers).to(dtype)

    def matrices(self) -> Iterator[Numbers]:
        """Of a weight of several, one after the other."""
        zeros = (None for _ in self.codes) if self.zeros is None else self.zeros
        for codes, scales, own in zip(self.codes, self.scales, zeros, strict=True):
            yield replace(self, codes=codes, scales=scales, zeros=own)

    def _spread(self, by_group: torch.Tensor) -> torch.Tensor:
        """[outputs, groups] -> [outputs, inputs]."""
        if self.order is not None:
            return by_group[:, self.order]
        if not self.group:
            return by_group
        return by_group.repeat_interleave(self.group, 1)[:, : self.codes.shape[-1]]


class _Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


_T = TypeVar("_T", bound=_Shaped)


class Quantised:
    """A slice of a weight that is dequantised when it is read."""

    def __init__(
        self, name: str, shape: list[int], numbers: Callable[[], Numbers], dtype: torch.dtype
    ):
        self._name, self._shape = name, shape
        self._numbers, self._dtype = numbers, dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return _NAMES[self._dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read(lambda numbers: numbers.dense(self._dtype))[index]

    def read(self, make: Callable[[Numbers], _T]) -> _T:
        """What `make` makes of the weight's numbers, with its shape. Raises UnsupportedModel for
        parts that do not belong together, and what `make` raises."""
        try:
            numbers = self._numbers()
            whole = make(numbers)
        except (KeyError, RuntimeError, IndexError, ValueError) as error:
            raise UnsupportedModel(f"{self._name}: its quantised parts do not fit") from error
        zeros = numbers.scales if numbers.zeros is None else numbers.zeros
        if list(whole.shape) != self._shape or zeros.shape != numbers.scales.shape:
            raise UnsupportedModel(f"{self._name}: its quantised parts do not fit")
        return whole


_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PLAIN = frozenset(_NAMES.values())


_OF_PARTS = {
    "qzeros", "scales", "g_idx", "weight_shape", "weight_g_idx", "weight_zero_point",
    "input_scale", "input_zero_point", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "activation_scale", "input_activation_scale",
}  # fmt: skip
"""Last parts of names of tensors that are no weights. Scales of activations and of KV are among
them: activations are rounded by their own size or not at all, and KV is kept as is configured."""


def _is_part(name: str, stored: Mapping[str, Slice]) -> bool:
    if name.rpartition(".")[2] in _OF_PARTS:
        return True
    wholes = (name.removesuffix(end) for end in ("_scale", "_scale_inv") if name.endswith(end))
    blocks = name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in stored
    return blocks or any(whole in stored for whole in wholes)


_Made = tuple[str, list[int], Callable[[], Numbers]]


def _made_of(scheme: Scheme, name: str, stored: Mapping[str, Slice]) -> _Made | None:
    """What a stored tensor is the main part of: a weight's name, its shape, and how it is read.
    None for tensors that are weights as they are, and for parts of other weights."""
    shape = stored[name].get_shape()
    if scheme.method in ("gptq", "awq"):
        if not name.endswith(".qweight"):
            return None
        module = name.removesuffix(".qweight")
        inputs = stored[f"{module}.scales"].get_shape()
        read = _read_gptq if scheme.method == "gptq" else _read_awq
        if scheme.method == "gptq":
            size = [shape[1], _gptq_inputs(module, stored)]
        else:
            size = [inputs[1], shape[0]]
        return f"{module}.weight", size, lambda: read(scheme, module, stored)
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in stored:
        whole = name.removesuffix("_blocks")
        # Files have [experts, outputs, groups, bytes], the network [experts, inputs, outputs].
        size = [*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3]]
        return whole, size, lambda: _read_mxfp4(whole, stored)
    if name.endswith(".weight_packed"):
        module = name.removesuffix(".weight_packed")
        size = [int(each) for each in stored[f"{module}.weight_shape"][:]]
        return f"{module}.weight", size, lambda: _read_packed(module, size, stored)
    for kind in ("_scale_inv", "_scale"):
        if f"{name}{kind}" in stored:
            return name, shape, partial(_read_scaled, scheme, name, stored[f"{name}{kind}"], stored)
    return None


def _read_scaled(scheme: Scheme, name: str, scale: Slice, stored: Mapping[str, Slice]) -> Numbers:
    """A tensor of int8 or fp8 with a scale for all, for each output, or for each block."""
    codes, scales = stored[name][...], scale[...]
    zero = stored.get(f"{name}_zero_point")
    zeros = None if zero is None else zero[...]
    outputs, inputs = codes.shape[-2:]
    if codes.dim() == 2 and scales.dim() < 2:
        # One for all, or one for each output.
        scales = scales.view(-1, 1)
        zeros = None if zeros is None else zeros.view(-1, 1)
    if scales.dim() == 1:
        # One for each matrix.
        scales = scales.view(-1, 1, 1)
    if scales.shape[-1] == 1 and scales.shape[-2] in (1, outputs):
        return Numbers(codes, scales, zeros)
    if scheme.block is None:
        return Numbers(codes, scales, zeros, group=_even(name, inputs, scales.shape[-1]))
    rows, columns = scheme.block
    scales = scales.repeat_interleave(rows, -2)[..., :outputs, :]
    return Numbers(codes, scales, zeros, group=columns)


def _even(name: str, inputs: int, groups: int) -> int:
    """How many inputs a group has. Raises UnsupportedModel where groups are not all of one size."""
    if inputs % groups:
        raise UnsupportedModel(f"{name}: {groups} groups do not divide {inputs} inputs")
    return inputs // groups


def _read_packed(module: str, size: list[int], stored: Mapping[str, Slice]) -> Numbers:
    """compressed-tensors' pack-quantized: codes with a sign, packed along inputs, and zeros along
    outputs."""
    outputs, inputs = size
    packed = stored[f"{module}.weight_packed"][...]
    bits = 4 if packed.shape[1] == -(-inputs // 8) else 8
    codes = _unpack(packed, bits)[:, :inputs]
    scales = stored[f"{module}.weight_scale"][...].view(outputs, -1)
    found, zeros = stored.get(f"{module}.weight_zero_point"), None
    if found is None:
        codes = (codes - (1 << (bits - 1))).view(torch.int8)
    else:
        zeros = _unpack(found[...].t(), bits).t()[:outputs]
    own, groups = stored.get(f"{module}.weight_g_idx"), scales.shape[1]
    order = None if own is None or groups == 1 else own[...].long()
    group = _even(module, inputs, groups) if order is None else 0
    return Numbers(codes, scales, zeros, bits, group, order)


def _gptq_inputs(module: str, stored: Mapping[str, Slice]) -> int:
    """Of a layer: zeros tell how many codes are in a word, because their outputs are known."""
    words, outputs = stored[f"{module}.qweight"].get_shape()
    return words * outputs // stored[f"{module}.qzeros"].get_shape()[1]


def _read_gptq(scheme: Scheme, module: str, stored: Mapping[str, Slice]) -> Numbers:
    """Codes packed along inputs, zeros along outputs."""
    packed = stored[f"{module}.qweight"][...]
    inputs = _gptq_inputs(module, stored)
    bits = 32 * packed.shape[0] // inputs
    zeros = _unpack(stored[f"{module}.qzeros"][...], bits).t()
    if scheme.zero_offset:
        # A zero of 0 is stored as one less, and wraps.
        zeros = ((zeros.int() + scheme.zero_offset) & ((1 << bits) - 1)).to(torch.uint8)
    scales = stored[f"{module}.scales"][...].t()
    found = stored.get(f"{module}.g_idx")
    order = None if found is None else found[...].long()
    groups = scales.shape[1]
    group = -(-inputs // groups)
    if order is None:
        group = _even(module, inputs, groups)
    elif torch.equal(order, torch.arange(inputs) // group):
        order = None
    return Numbers(_unpack(packed.t(), bits), scales, zeros, bits, group, order)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AutoAWQ's gemm layout the codes of eight consecutive outputs are."""


def _read_awq(_scheme: Scheme, module: str, stored: Mapping[str, Slice]) -> Numbers:
    """Codes and zeros packed along outputs."""

    def unpacked(name: str) -> torch.Tensor:
        codes = _unpack(stored[f"{module}.{name}"][...], 4)
        return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1).t()

    scales = stored[f"{module}.scales"][...].t()
    codes = unpacked("qweight")
    group = _even(module, codes.shape[1], scales.shape[1])
    return Numbers(codes, scales, unpacked("qzeros"), 4, group)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of MXFP4 by their codes."""
_E8M0_BIAS = 127


def _read_mxfp4(whole: str, stored: Mapping[str, Slice]) -> Numbers:
    """Two codes in a byte, the first in the lower half; scales are exponents, of 32 codes each."""
    packed = stored[f"{whole}_blocks"][...].flatten(-2)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    exponents = stored[f"{whole}_scales"][...].int() - _E8M0_BIAS
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return Numbers(codes, scales, bits=4, group=32, transposed=True, is_e2m1=True)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, codes], the first code in a word's lowest bits."""
    codes = words.new_empty(*words.shape, 32 // bits, dtype=torch.uint8)
    for index in range(32 // bits):
        codes[..., index] = (words >> (bits * index)) & ((1 << bits) - 1)
    return codes.flatten(1)
