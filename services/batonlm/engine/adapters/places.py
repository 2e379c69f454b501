"""Where the linear layers of transformers' network are computed, by their names there.

An adapter names layers of transformers. The network that runs may compute several of them at once
(queries, keys and values; gate and up), in any form of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from batonlm.engine.fused.decoder import Decoder, LinearPart
from batonlm.engine.kept import KeptLinear
from batonlm.engine.lean import Conv1D
from batonlm.engine.linear import PackedLinear

_LINEAR = nn.Linear, KeptLinear, PackedLinear


class Place(NamedTuple):
    """Where a linear layer of transformers' network is computed."""

    layer: int
    """Which of the layers with hooks."""
    inputs: int
    first: int
    """Of that layer's outputs, the first that are this one's."""
    outputs: int


class Part(NamedTuple):
    """What an adapter adds at a place: up @ (down @ x)."""

    place: Place
    down: torch.Tensor
    """[rank, inputs]."""
    up: torch.Tensor
    """[outputs, rank]."""


def find_places(
    network: nn.Module, run: Callable[[], object]
) -> tuple[list[nn.Module], dict[str, Place]]:
    """The layers to whose outputs adapters can add, and which of transformers' layers they compute,
    by name. Those that `run` calls once, with every row of the step: an output layer gets fewer,
    and an expert those of its own."""
    parts = list(_linear_parts(network))
    layers = {id(part.module): part.module for part in parts}
    seen: dict[int, list[bool]] = {key: [] for key in layers}
    rows = 0

    def begin(_network: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal rows
        rows = (named["input_ids"] if named else given[0].token_ids).numel()

    def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        whole = bool(given) and isinstance(output, torch.Tensor)
        seen[id(layer)].append(
            whole and given[0].numel() == rows * given[0].shape[-1]
            and output.numel() == rows * output.shape[-1]
        )  # fmt: skip

    hooks = [network.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [layer.register_forward_hook(note) for layer in layers.values()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found = [layer for key, layer in layers.items() if seen[key] == [True]]
    index = {id(layer): i for i, layer in enumerate(found)}
    places = {
        part.name: Place(index[id(part.module)], _inputs(part.module), part.first, part.outputs)
        for part in parts
        if id(part.module) in index
    }
    return found, places


def _linear_parts(network: nn.Module) -> Iterator[LinearPart]:
    if isinstance(network, Decoder):
        yield from network.linear_parts()
        return
    for name, module in network.named_modules():
        if isinstance(module, Conv1D):
            yield LinearPart(name, module, 0, int(module.nf))
        elif isinstance(module, _LINEAR):
            yield LinearPart(name, module, 0, int(module.out_features))


def _inputs(layer: Any) -> int:
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)
