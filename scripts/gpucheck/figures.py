"""The arithmetic behind the figures of a GPU check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder's sizes, as far as bytes and operations follow from them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @property
    def step_weights(self) -> int:
        """Weights that every step reads: all but the embedding table, of which it reads rows."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocab

    @property
    def kv_elements(self) -> int:
        """Of one position."""
        return 2 * self.layers * self.kv_heads * self.head_size


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = Shape(16, 2048, 8192, 32, 8, 64, 128256)
TINY = Shape(1, 64, 128, 4, 2, 16, 512)
"""Of a rehearsal."""


def decode_bytes(shape: Shape, batch: int, context: int, element: int) -> int:
    """The fewest bytes that a decode step moves: weights once, and every sequence's KV once."""
    return element * (shape.step_weights + batch * context * shape.kv_elements)


def prefill_flops(shape: Shape, tokens: int, first: int) -> int:
    """Multiplications and additions of a chunk at positions first, …, one row of logits.

    Two operations per weight and token; per layer and pair of query and key that it sees, two per
    element for the scores and two for the values.
    """
    layers = shape.step_weights - shape.hidden * shape.vocab
    pairs = tokens * first + tokens * (tokens + 1) // 2
    attention = 4 * shape.layers * shape.heads * shape.head_size * pairs
    return 2 * (layers * tokens + shape.hidden * shape.vocab) + attention


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def first_difference(got: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where two texts part; None when one is the start of the other."""
    for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return place
    return None


def agreement(got: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens before each text's first difference, and tokens in all."""
    alike = 0
    for one, other in zip(got, wanted, strict=True):
        place = first_difference(one, other)
        alike += len(other) if place is None else place
    return alike, sum(map(len, wanted))
