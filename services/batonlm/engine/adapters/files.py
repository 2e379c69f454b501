"""An adapter's files as peft writes them, read once and checked before anything is made of them.

What changes an answer and is not computed here is refused by name: a setting that is not known
counts as such unless it is off, so that a later peft's inventions are refused, too. A folder may
come from anyone: files are read whole through one descriptor each, within a bound, and what was
read is what the digest is of.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from batonlm.core.errors import InvalidArgument
from batonlm.registry.digest import adapter_digest

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MOST_RANK = 512
_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
"""Of every name in an adapter's file; what follows is transformers' own name."""
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.weight")
_PLAIN_NAME = re.compile(r"\^?[\w.-]+")
"""Of patterns, which are regular expressions to peft: a stranger's may take for ever."""
_DTYPES = torch.float32, torch.bfloat16, torch.float16

_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"}
_READ |= {"target_modules", "init_lora_weights"}
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    "velora_config",
}  # fmt: skip
"""Settings of training, and of which layers have matrices: that is told by the matrices."""
_LEAVE_THE_MODEL = {True, False, None, "gaussian", "eva", "orthogonal"}
"""Ways in which matrices begin; others also change the model's own weights."""
_SETTINGS = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "trained modules (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "layer_replication": "copied layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (alora_invocation_tokens)",
    "target_parameters": "matrices of parameters that are no linear layer's (target_parameters)",
    "lora_bias": "biases of its matrices (lora_bias)",
    "use_qalora": "QALoRA (use_qalora)",
}


def refused(folder: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"adapter {folder}: {why}", field="adapter")


class Matrices(NamedTuple):
    """What is added to one linear layer: up @ (down @ x) * scale."""

    down: torch.Tensor
    """[rank, inputs], as stored."""
    up: torch.Tensor
    """[outputs, rank], as stored."""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read."""

    name: str
    """Its folder's."""
    digest: str
    layers: Mapping[str, Matrices]
    """By the name that the linear layer has in transformers' network."""
    targets: tuple[str, ...]
    """Ends of names: all layers of these names are meant to have matrices. Empty where the
    settings choose layers in another way."""

    @property
    def rank(self) -> int:
        return max(each.rank for each in self.layers.values())

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return sum(each.down.nbytes + each.up.nbytes for each in self.layers.values())


def read_adapter(folder: Path, most_bytes: int) -> AdapterFiles:
    """most_bytes: of the file of matrices. Raises InvalidArgument (`adapter`), which names what
    cannot be served."""
    name = folder.name
    if not folder.is_dir():
        raise refused(name, "there is no such folder")
    config_bytes = _read(folder, CONFIG, _CONFIG_BYTES)
    weights = _read(folder, WEIGHTS, most_bytes)
    settings = _settings(name, config_bytes)
    try:
        stored = load_tensors(weights)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        raise refused(name, f"{WEIGHTS} is corrupt or cut short") from None
    layers = _paired(name, stored, settings)
    digest = adapter_digest({CONFIG: config_bytes, WEIGHTS: weights})
    targets = settings.get("target_modules")
    chosen = any(settings.get(key) for key in ("layers_to_transform", "exclude_modules"))
    named = targets if isinstance(targets, list) and not chosen else []
    return AdapterFiles(name, digest, layers, tuple(map(str, named)))


def _read(folder: Path, file: str, most: int) -> bytes:
    """A file's bytes, if it lies in the folder and is a file."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise refused(folder.name, f"{file} is a link to outside of its folder")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pickled = file == WEIGHTS and any(folder.glob("adapter_model.*"))
        instead = ", and other formats than safetensors are not read" if pickled else ""
        raise refused(folder.name, f"it has no {file} that can be read{instead}") from None
    with open(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise refused(folder.name, f"{file} is no file")
        # One byte more than there may be shows a file that grows.
        content = opened.read(most + 1) if found.st_size <= most else b""
        if found.st_size > most or len(content) > most:
            raise refused(folder.name, f"{file} is larger than the {most} bytes that it may have")
    return content


def _settings(name: str, content: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise refused(name, f"{CONFIG} is no JSON object")
    if settings.get("peft_type") != "LORA":
        raise refused(name, f"it is of type {str(settings.get('peft_type'))[:40]}, and not LORA")
    for key, value in settings.items():
        if key in _READ or key in _WITHOUT_EFFECT or not value:
            continue
        raise refused(name, f"it has {_SETTINGS.get(key, str(key)[:60])}, which is not served")
    if settings.get("bias", "none") != "none":
        raise refused(name, f"it has trained biases (bias {str(settings['bias'])[:40]})")
    begun = settings.get("init_lora_weights", True)
    if isinstance(begun, list | dict) or begun not in _LEAVE_THE_MODEL:
        raise refused(
            name,
            f"init_lora_weights {str(begun)[:40]} changes the model's own weights, too: convert it "
            "when it is saved (path_initial_model_for_weight_conversion)",
        )
    return settings


def _paired(
    name: str, stored: Mapping[str, torch.Tensor], settings: dict[str, Any]
) -> dict[str, Matrices]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in stored.items():
        match = _MATRIX.fullmatch(key.removeprefix(_PREFIX))
        if match is None or not key.startswith(_PREFIX):
            raise refused(name, f"it has {key[:120]}, which is no matrix of a linear layer")
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise refused(name, f"{key[:120]} is of type {kind}")
        if tensor.dim() != 2 or 0 in tensor.shape:
            raise refused(name, f"{key[:120]} has the shape {list(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            raise refused(name, f"{key[:120]} holds what is no number")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise refused(name, "it has no matrices")
    layers = {}
    for layer, pair in found.items():
        if len(pair) != 2:
            raise refused(name, f"{layer[:120]} has only one of its two matrices")
        rank, scale = _rank_and_scale(name, layer, settings)
        down, up = pair["A"], pair["B"]
        if len(down) != rank or up.shape[1] != rank:
            raise refused(
                name,
                f"{layer[:120]} is of rank {len(down)} and {up.shape[1]}, its settings say {rank}",
            )
        layers[layer] = Matrices(down, up, scale)
    return layers


def _rank_and_scale(name: str, layer: str, settings: dict[str, Any]) -> tuple[int, float]:
    """As peft finds them: the first pattern that is the end of the layer's name, else what is the
    same for all."""
    values = []
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        value = settings.get(key, 8)
        patterns = settings.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise refused(name, f"its {pattern} is no object")
        for end, own in patterns.items():
            if not _PLAIN_NAME.fullmatch(end):
                raise refused(name, f"its {pattern} has {end[:60]!r}, which is no plain name")
            whole = end.removeprefix("^")
            if layer == whole or (whole == end and layer.endswith(f".{end}")):
                value = own
                break
        numbers = int if key == "r" else int | float
        if not isinstance(value, numbers) or isinstance(value, bool) or not math.isfinite(value):
            raise refused(name, f"its {key} is no number")
        values.append(value)
    rank, alpha = values
    if not 0 < rank <= MOST_RANK:
        raise refused(name, f"its rank is {rank}, and may be 1 to {MOST_RANK}")
    return int(rank), float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
