"""Builds a rank's network and reads its slices of the weights.

The network is laid out without memory, its layers made as small as the rank's, and only then given
memory: a rank never holds what is another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from baton.core.errors import InvalidArgument
from baton.engine.guards import UnsupportedModel, check_files
from baton.engine.loader import Build
from baton.engine.progress import Bar
from baton.engine.ranks.group import Group
from baton.engine.ranks.runner import FIELD
from baton.engine.ranks.split import Cut, check_split, shrink, sum_up


def shard_builder(group: Group) -> Build:
    """What `loader.load` builds a rank's network with."""

    def build(_class: Any, folder: Path, settings: Any, dtype: torch.dtype, bar: Bar) -> nn.Module:
        plan = check_split(settings, group.size)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=dtype, attn_implementation="eager"
            )
        cuts = shrink(network, plan, group.rank, group.size)
        network.to_empty(device="cpu")
        network.tie_weights()
        _compute_buffers(network)
        _read(network, folder, cuts, bar)
        sum_up(network, plan, group)
        if (folder / "generation_config.json").is_file():
            network.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        eval_mode: nn.Module = network.eval().requires_grad_(False)
        return eval_mode

    return build


@torch.no_grad()
def _compute_buffers(network: nn.Module) -> None:
    """Buffers that are in no file: rotary frequencies, scales. The model knows how to make them;
    one that it does not make stays a NaN, and the model is refused."""
    stored = network.state_dict().keys()
    for prefix, module in network.named_modules():
        names = [name for name, _ in module.named_buffers(prefix, recurse=False)]
        own = [network.get_buffer(name) for name in names if name not in stored]
        if not own:
            continue
        if not all(buffer.is_floating_point() for buffer in own):
            raise _not_here(network, prefix)
        for buffer in own:
            buffer.fill_(torch.nan)
        network._init_weights(module)  # type: ignore[operator]
        if any(bool(buffer.isnan().any()) for buffer in own):
            raise _not_here(network, prefix)


@torch.no_grad()
def _read(network: nn.Module, folder: Path, cuts: dict[str, Cut], bar: Bar) -> None:
    wanted: dict[str, torch.Tensor] = dict(network.state_dict(keep_vars=True))
    done: set[int] = set()
    for file in check_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in wanted.keys() & set(tensors.keys()):
                target = wanted[name]
                part = _slice(tensors.get_slice(name), cuts.get(name))
                if part.shape != target.shape:
                    raise UnsupportedModel(f"model {folder.name}: {name} has another shape")
                target.copy_(part)
                done.add(id(target))
                bar.advance(part.nbytes)
    # Tied weights are one tensor under two names, and one of them is enough.
    lacking = [name for name, target in wanted.items() if id(target) not in done]
    if lacking:
        raise UnsupportedModel(f"model {folder.name} lacks weights, among them {lacking[0]}")
    bar.advance(bar.total)


def _slice(stored: Any, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        whole: torch.Tensor = stored[:]
        return whole
    part: torch.Tensor = (
        stored[cut.first : cut.end] if cut.dim == 0 else stored[:, cut.first : cut.end]
    )
    return part


def _not_here(network: nn.Module, name: str) -> InvalidArgument:
    kind = network.config.model_type  # type: ignore[union-attr]
    return InvalidArgument(f"{kind}: {name} cannot be made without the whole model", field=FIELD)
