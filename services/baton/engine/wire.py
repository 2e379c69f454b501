"""A KV chunk's payload as tensors, and its numbers' way from the type they are kept in to the
wire's and back.

The layout is position-major, [layer][k, v][position][head][element], whatever the memory's is.
"""

from __future__ import annotations

import torch

from baton.core.errors import Internal
from baton.core.request.model import KvLayout

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def is_lossless(stored: str, wire: str) -> bool:
    """Whether numbers kept as `stored` are all the same after a journey as `wire`."""
    return wire in (stored, "float32")


def converted(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of another type: what lies outside its range becomes its largest finite
    number, as infinities do, and NaN stays. Numbers of that type are returned as they are."""
    if numbers.dtype == dtype:
        return numbers
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(numbers.dtype).max:
        # In float32, because the limit may not be a number of the narrow type that they come in.
        numbers = numbers.float().clamp(-largest, largest)
    return numbers.to(dtype)


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Of some positions, both [layers, positions, heads, size]."""


def as_tensor(layout: KvLayout, count: int, payload: memoryview) -> torch.Tensor:
    """The payload of `count` positions, flat, sharing its memory. Raises Internal for one of
    another size."""
    if count <= 0 or payload.nbytes != count * layout.bytes_per_position:
        raise Internal("the payload's size does not fit its positions")
    return torch.frombuffer(payload, dtype=DTYPES[layout.dtype])


def keys_and_values(layout: KvLayout, count: int, wire: torch.Tensor) -> KeysAndValues:
    """Both as views of a flat payload of `count` positions."""
    by_layer = wire.view(layout.num_layers, -1)
    split = count * layout.num_kv_heads * layout.key_size
    shape = (layout.num_layers, count, layout.num_kv_heads, -1)
    return by_layer[:, :split].view(shape), by_layer[:, split:].view(shape)


def of_heads(wire: KeysAndValues, first: int, count: int) -> KeysAndValues:
    """The part of some consecutive heads, as views."""
    return wire[0].narrow(2, first, count), wire[1].narrow(2, first, count)
