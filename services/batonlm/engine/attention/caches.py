"""Models that transformers gives a cache of their own, in place of its `Cache`: MiniMax and RWKV.
Each is given it over the states and KV that a pool keeps.

Their states are tensors of the whole model, or of some layers, that begin with numbers of their own
and are rewritten by every position, as those of layers in a `Cache` are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn


class StateKey(NamedTuple):
    """Names one tensor of one layer's state."""

    layer: int
    which: str
    """"conv" or "recurrent"."""
    number: int
    """Among the layer's states of its kind."""


Held = Mapping[StateKey, torch.Tensor]
"""A sequence's state. Layers change it in place."""


class CacheOfItsOwn(Protocol):
    """How one model is given what a sequence has."""

    stepwise: bool
    """Whether the model takes up a state position by position, in one call."""

    def empty(self) -> dict[StateKey, torch.Tensor]:
        """The state before the first position, new."""

    def given(self, layers: Sequence[Any], past: int, held: Held) -> dict[str, Any]:
        """What the model's forward pass takes. layers: of a transformers Cache, which keep KV."""

    def take(self, given: Mapping[str, Any], held: Held) -> None:
        """Puts what the forward pass left into `held`."""


class MiniMaxStates:
    """One tensor of each layer with linear attention, which MiniMax replaces."""

    stepwise = True

    def __init__(self, network: Any):
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        self._network = network
        self._class: Callable[[], Any] = MiniMaxCache

    def empty(self) -> dict[StateKey, torch.Tensor]:
        config = self._network.config
        size = config.head_dim or config.hidden_size // config.num_attention_heads
        shape = 1, config.num_attention_heads, size, size
        weight = next(self._network.parameters())
        return {
            StateKey(layer, "recurrent", 0): weight.new_zeros(shape)
            for layer, kind in enumerate(config.layer_types)
            if kind == "linear_attention"
        }

    def given(self, layers: Sequence[Any], past: int, held: Held) -> dict[str, Any]:
        cache: Any = self._class()
        cache.layers = list(layers)
        for layer in range(len(layers)):
            # Without one, a prompt's first chunk is computed in blocks; with one, by positions.
            kept = held.get(StateKey(layer, "recurrent", 0)) if past else None
            cache.set_linear_cache(layer, kept)
        return {"cache": cache}

    def take(self, given: Mapping[str, Any], held: Held) -> None:
        for key, tensor in held.items():
            tensor.copy_(given["cache"].get_linear_cache(key.layer))


class RwkvStates:
    """Five tensors of all layers, the last dimension; RWKV changes them in place."""

    stepwise = False
    """A first chunk is computed so, too."""

    def __init__(self, network: Any):
        self._network = network

    def empty(self) -> dict[StateKey, torch.Tensor]:
        config, weight = self._network.config, self._network.get_input_embeddings().weight
        shape = 1, config.hidden_size, config.num_hidden_layers
        found = {}
        for number in range(_RWKV_TENSORS):
            tensor = weight.new_zeros(shape, dtype=None if number <= 1 else torch.float32)
            found[StateKey(0, "recurrent", number)] = tensor
        found[StateKey(0, "recurrent", _RWKV_TENSORS - 1)].fill_(_RWKV_LEAST)
        return found

    def given(self, layers: Sequence[Any], past: int, held: Held) -> dict[str, Any]:
        keys = (StateKey(0, "recurrent", number) for number in range(_RWKV_TENSORS))
        return {"state": [held[key] for key in keys]}

    def take(self, given: Mapping[str, Any], held: Held) -> None:
        """It is there."""


_RWKV_TENSORS = 5
_RWKV_LEAST = -1e30
"""The logarithm of no weight at all, as RWKV's own states begin."""

_MODELS: dict[str, Callable[[Any], CacheOfItsOwn]] = {
    "minimax": MiniMaxStates,
    "rwkv": RwkvStates,
}


def cache_of_its_own(network: nn.Module) -> CacheOfItsOwn | None:
    """How a model with a cache of its own is given it; None for those with transformers' Cache."""
    config: Any = network.config
    made = _MODELS.get(config.model_type)
    return None if made is None else made(network)
