"""ModelFacts, what a token of a model computes, reads and leaves behind.

Counts multiplications and bytes of weights and KV. What else a layer does (norms, rotations, the
activations that are written and read) is small beside them, and is left to the efficiency that
a roofline is given.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Parameters are counts, everything else bytes or as it says.

    body: parameters that every token is multiplied with, without the head and without experts.
    head: of the product that makes logits, computed for sampled tokens only. experts: parameters of
    all experts of all layers; each token goes through `chosen` of `num_experts`. element: bytes of
    a parameter. kv_position: bytes of a token's KV as stored; wire_position: as it travels.
    query_heads, head_sizes: of keys and values together, for one layer. sliding: how many of the
    layers look back over `window` positions only.
    """

    name: str
    dtype: str
    weights: int
    element: int
    body: int
    head: int
    experts: int
    num_experts: int
    chosen: int
    layers: int
    query_heads: int
    head_sizes: int
    sliding: int
    window: int
    kv_position: int
    wire_position: int
    max_model_len: int
    unread: int = 0
    """Bytes of weights that are looked up, not read: an embedding that is not the head, too."""

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, without the head."""
        return self.body + (self.experts * self.chosen / self.num_experts if self.experts else 0)

    def read_bytes(self, tokens: float) -> float:
        """Of weights, in one step of so many tokens. Experts nobody chose are not read; choices
        count as independent of each other."""
        everything = float(self.weights - self.unread)
        if not self.experts:
            return everything
        untouched = float((1.0 - self.chosen / self.num_experts) ** tokens)
        return everything - untouched * self.experts * self.element

    def attended(self, first: int, end: int) -> float:
        """Pairs of a position from `first` to before `end` and one that it looks at, the mean of
        all layers. Position n looks at n + 1."""
        whole = _triangle(end) - _triangle(first)
        if not self.sliding:
            return float(whole)
        near, past = min(end, self.window), max(0, end - max(first, self.window))
        windowed = max(0, _triangle(near) - _triangle(min(first, near))) + past * self.window
        return (whole * (self.layers - self.sliding) + windowed * self.sliding) / self.layers

    def prefill_flops(self, first: int, end: int) -> float:
        """Of the positions from `first` to before `end` of one prompt, whose last is sampled."""
        pairs = self.attended(first, end)
        return 2.0 * (end - first) * self.active + self._attention(pairs) + 2.0 * self.head

    def decode_flops(self, rows: float, context: float) -> float:
        """Of one step of so many sequences that have so many positions each."""
        return rows * (2.0 * (self.active + self.head) + self._attention(self.looks_at(context)))

    def kv_read_bytes(self, context: float) -> float:
        """For one token of a sequence that has so many positions."""
        return self.kv_position * self.looks_at(context)

    def looks_at(self, context: float) -> float:
        """Positions that one token attends to, the mean of all layers."""
        if not self.sliding:
            return context
        full = (self.layers - self.sliding) * context
        return (full + self.sliding * min(context, self.window)) / self.layers

    def _attention(self, pairs: float) -> float:
        """A multiplication and an addition for each number of a key, and of a value."""
        return 2.0 * pairs * self.layers * self.query_heads * self.head_sizes


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
