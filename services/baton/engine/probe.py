"""Finds the shape of a model's attention and KV by running it once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.errors import Internal
from baton.core.request.model import KvLayout
from baton.engine.attention import LayerArguments
from baton.engine.guards import UnsupportedModel
from baton.engine.loader import LoadedModel, run_network
from baton.engine.wire import DTYPES


class KvProbe:
    """An attention context that computes nothing and notes what attention layers are given."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: set[tuple[int, int, int, int]] = set()
        self.softcap = False
        self.sliding = 0

    def attend(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self.layers.append(arguments.layer)
        self.shapes.add((query.shape[0], key.shape[0], key.shape[-1], value.shape[-1]))
        self.softcap |= arguments.softcap is not None
        self.sliding += arguments.window is not None
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of a model looks like. dtype: the type that KV is kept in. per_head: query
    heads per KV head. sliding_layers: how many look back over a window only.
    """

    layout: KvLayout
    dtype: str
    per_head: int
    softcap: bool
    sliding_layers: int = 0


def probe_attention(loaded: LoadedModel, wire_dtype: str = "auto") -> AttentionShape:
    """The shape of attention and KV, taken from a run of the wired model, not its configuration.

    wire_dtype: of KV on the wire; auto is the type that it is kept in.
    Raises UnsupportedModel unless attention is called exactly once for each layer, with all it
    needs.
    """
    network = loaded.network
    name = network.config.model_type  # type: ignore[union-attr]
    probe = KvProbe()
    device = next(network.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    try:
        run_network(network, tokens, positions, tokens[0, :1], probe)
    except Internal as error:
        raise UnsupportedModel(f"{name}: {error.message}") from error
    layers = int(network.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr,operator]
    if sorted(probe.layers) != list(range(layers)):
        raise UnsupportedModel(
            f"{name}: attention was called for {len(probe.layers)} of {layers} layers"
        )
    if len(probe.shapes) != 1:
        raise UnsupportedModel(f"{name}: its layers have KV of different shapes")
    ((query_heads, heads, key_size, value_size),) = probe.shapes
    dtype = next(k for k, v in DTYPES.items() if v == network.dtype)
    layout = KvLayout(
        model_digest=loaded.description.digest,
        dtype=dtype if wire_dtype == "auto" else wire_dtype,
        num_layers=layers,
        num_kv_heads=heads,
        key_size=key_size,
        value_size=value_size,
    )
    return AttentionShape(layout, dtype, query_heads // heads, probe.softcap, probe.sliding)
