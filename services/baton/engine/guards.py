"""Refuses, by name and before serving, models that would load but answer wrongly.

Each guard stands for a failure that was seen to be silent: transformers loads the model, runs it,
and the tokens are wrong. Knows configurations and files; what only running shows is `selfcheck`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from baton.core.errors import InvalidArgument

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(InvalidArgument):
    """The model cannot be served correctly. The message says why; field is "model"."""

    def __init__(self, message: str):
        super().__init__(message, field="model")


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


def check_class(model_class: Any, config: Any) -> None:
    """Raises UnsupportedModel for architectures whose attention cannot be replaced."""
    name = config.model_type
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name}: its attention cannot be replaced (no attention backend support)"
        )
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name}: it keeps a recurrent state, which is not KV")
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(sorted(others))} are not served")


def rope_limit(config: Any) -> int | None:
    """Positions up to which rotary frequencies are fixed, or None when they always are.

    With rope types dynamic and longrope the frequencies depend on the longest sequence of a batch:
    below the original length they are constant, beyond it one sequence would change all others.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    limits = [
        int(entry.get("original_max_position_embeddings") or text.max_position_embeddings)
        for entry in entries
        if "dynamic" in entry.get("rope_type", "") or entry.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)
