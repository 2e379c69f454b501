"""Makes a model of random weights in a shape; runs in a process of its own."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

SEED = 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: settings, as in `shapes.SHAPES`, and the target folder, which is there whole or not."""
    import torch

    transformers: Any = import_module("transformers")
    settings, target = dict(job["settings"]), Path(job["target"])
    config = getattr(transformers, settings.pop("config"))(**settings)
    torch.manual_seed(SEED)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place, "made")
        network.save_pretrained(made)
        if not target.exists():
            os.replace(made, target)
    return {}
