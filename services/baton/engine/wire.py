"""A parcel's payload as tensors; knows its layout, not where KV is stored.

The layout is position-major, [layer][k, v][position][head][element], whatever the memory's is.
"""

from __future__ import annotations

import torch

from baton.core.errors import Internal
from baton.core.model import KvLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_tensor(layout: KvLayout, count: int, payload: memoryview) -> torch.Tensor:
    """The payload of `count` positions, flat, sharing its memory. Raises Internal for one of
    another size."""
    if count <= 0 or payload.nbytes != count * layout.bytes_per_position:
        raise Internal("the payload's size does not fit its positions")
    return torch.frombuffer(payload, dtype=DTYPES[layout.dtype])


def keys_and_values(
    layout: KvLayout, count: int, wire: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as views [layers, count, heads, size] of a flat payload."""
    by_layer = wire.view(layout.num_layers, -1)
    split = count * layout.num_kv_heads * layout.key_size
    shape = (layout.num_layers, count, layout.num_kv_heads, -1)
    return by_layer[:, :split].view(shape), by_layer[:, split:].view(shape)
