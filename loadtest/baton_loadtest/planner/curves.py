"""Estimates durations of prefill and decode, by a roofline or from workers' measurements.

In a roofline a step takes as long as its arithmetic or its memory reads, whichever is longer, at a
given share of the data sheet's figures, plus a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed

GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """The data sheet of one device. Its figures are upper limits, not what is reached."""

    name: str
    memory: float
    """In bytes. A gigabyte counts as 10**9 although some devices have 2**30, so that a plan
    never counts on missing memory."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Per second; dense, bfloat16 with float32 accumulation."""
    link: float = 0.0
    """Bytes per second to its host, one way, which also limits any network card; 0: unknown."""


_PCIE_4, _PCIE_5 = 32 * GB, 64 * GB

KNOWN = (
    Gpu("B200", 180 * GB, 8000 * GB, 2250e12, _PCIE_5),
    Gpu("H200", 141 * GB, 4800 * GB, 989e12, _PCIE_5),
    Gpu("H100-SXM", 80 * GB, 3350 * GB, 989e12, _PCIE_5),
    Gpu("H100-PCIe", 80 * GB, 2000 * GB, 756e12, _PCIE_5),
    Gpu("A100-80GB", 80 * GB, 2039 * GB, 312e12, _PCIE_4),
    Gpu("A100-40GB", 40 * GB, 1555 * GB, 312e12, _PCIE_4),
    Gpu("A10", 24 * GB, 600 * GB, 125e12, _PCIE_4),
    Gpu("L40S", 48 * GB, 864 * GB, 362e12, _PCIE_4),
    Gpu("L4", 24 * GB, 300 * GB, 121e12, _PCIE_4),
    Gpu("MI300X", 192 * GB, 5300 * GB, 1307e12, _PCIE_5),
    Gpu("MI325X", 256 * GB, 6000 * GB, 1307e12, _PCIE_5),
)
"""The SXM or OAM form unless the name says otherwise."""


def known(name: str) -> Gpu:
    """Ignores case, spaces and dashes. Raises InvalidArgument with the list of names."""
    for gpu in KNOWN:
        if _plain(gpu.name) == _plain(name):
            return gpu
    raise InvalidArgument(
        f"{name!r} is not known; {', '.join(gpu.name for gpu in KNOWN)} are, and any other can be "
        "described by --gpu-memory-gib, --gpu-bandwidth and --gpu-tflops",
        field="gpu",
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a token of a model computes, reads and stores.

    Only multiplications and bytes of weights and KV count. Everything else in a layer (norms,
    rotations, activations) is small in comparison, and part of a roofline's efficiency.
    """

    name: str
    dtype: str
    weights: int
    element: int
    """Bytes of a parameter."""
    body: int
    """Parameters that every token is multiplied with, without the head and the experts."""
    head: int
    """Parameters of the product that makes logits, computed for sampled tokens only."""
    experts: int
    """Parameters of all experts of all layers."""
    num_experts: int
    chosen: int
    """Number of experts that each token passes through."""
    layers: int
    query_heads: int
    head_sizes: int
    """Size of keys and values together, for one layer."""
    sliding: int
    """Number of layers that attend to the last `window` positions only."""
    window: int
    kv_position: int
    """Bytes of a token's KV as stored."""
    wire_position: int
    """Bytes of a token's KV on the wire."""
    max_model_len: int
    unread: int = 0
    """Bytes of weights that are looked up, not read in full, such as an embedding that is not also
    the head."""

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, without the head."""
        return self.body + (self.experts * self.chosen / self.num_experts if self.experts else 0)

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights read in one step with so many tokens. Experts that no token chooses are
        not read; choices are assumed to be independent."""
        everything = float(self.weights - self.unread)
        if not self.experts:
            return everything
        untouched = float((1.0 - self.chosen / self.num_experts) ** tokens)
        return everything - untouched * self.experts * self.element

    def attended(self, first: int, end: int) -> float:
        """Returns the pairs of a position in [first, end) and one that it attends to, as the mean
        of all layers. Position n attends to n + 1 positions."""
        whole = _triangle(end) - _triangle(first)
        if not self.sliding:
            return float(whole)
        near, past = min(end, self.window), max(0, end - max(first, self.window))
        windowed = max(0, _triangle(near) - _triangle(min(first, near))) + past * self.window
        return (whole * (self.layers - self.sliding) + windowed * self.sliding) / self.layers

    def prefill_flops(self, first: int, end: int) -> float:
        """Of positions [first, end) of one prompt, whose last is sampled."""
        pairs = self.attended(first, end)
        return 2.0 * (end - first) * self.active + self._attention(pairs) + 2.0 * self.head

    def decode_flops(self, rows: float, context: float) -> float:
        """Of one step with so many sequences, each with `context` positions."""
        return rows * (2.0 * (self.active + self.head) + self._attention(self.looks_at(context)))

    def kv_read_bytes(self, context: float) -> float:
        """For one token of a sequence with `context` positions."""
        return self.kv_position * self.looks_at(context)

    def looks_at(self, context: float) -> float:
        """Positions that one token attends to, as the mean of all layers."""
        if not self.sliding:
            return context
        full = (self.layers - self.sliding) * context
        return (full + self.sliding * min(context, self.window)) / self.layers

    def _attention(self, pairs: float) -> float:
        """One multiplication and one addition per number of a key, and of a value."""
        return 2.0 * pairs * self.layers * self.query_heads * self.head_sizes


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


class PrefillCurve(Protocol):
    """The seconds for positions [first, end) of one prompt."""

    @property
    def source(self) -> str:
        """roofline or measured."""

    @property
    def step_tokens(self) -> int:
        """Maximum number of positions in a step; 0: unlimited."""

    def alone_s(self, first: int, end: int) -> float:
        """With no other work on the worker."""

    def busy_s(self, first: int, end: int) -> float:
        """The time that it keeps a worker busy whose steps are filled with other prompts."""

    def why(self, first: int, end: int) -> str:
        """Describes how `alone_s` is composed."""


class DecodeCurve(Protocol):
    @property
    def source(self) -> str:
        """roofline or measured."""

    def step_s(self, rows: float, context: float) -> float:
        """Seconds of one step with so many sequences of `context` positions. Grows with both."""

    def why(self, rows: float, context: float) -> str:
        """Describes how `step_s` is composed."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The reached shares of a data sheet's figures."""

    compute: float
    bandwidth: float
    step_s: float
    """Constant time of every step."""


@dataclass(frozen=True, slots=True)
class PrefillRoofline:
    model: ModelFacts
    gpu: Gpu
    efficiency: Efficiency
    step_tokens: int
    source: str = "roofline"

    def alone_s(self, first: int, end: int) -> float:
        return self._seconds(first, end, -(-(end - first) // self.step_tokens))

    def busy_s(self, first: int, end: int) -> float:
        return self._seconds(first, end, (end - first) / self.step_tokens)

    def why(self, first: int, end: int) -> str:
        compute_s, read_s = self._parts(first, end, -(-(end - first) // self.step_tokens))
        flops = self.model.prefill_flops(first, end)
        return (
            f"{end - first} tokens take {flops / 1e12:.3g} TFLOP, {duration(compute_s)} at "
            f"{self._flops / 1e12:.0f} TFLOP/s, and reading weights {duration(read_s)}"
        )

    def bound(self, first: int, end: int) -> str:
        compute_s, read_s = self._parts(first, end, (end - first) / self.step_tokens)
        return "compute" if compute_s >= read_s else "bandwidth"

    @property
    def _flops(self) -> float:
        return self.gpu.flops * self.efficiency.compute

    def _parts(self, first: int, end: int, steps: float) -> tuple[float, float]:
        read = self.model.read_bytes(min(end - first, self.step_tokens))
        rate = self.gpu.bandwidth * self.efficiency.bandwidth
        return self.model.prefill_flops(first, end) / self._flops, steps * read / rate

    def _seconds(self, first: int, end: int, steps: float) -> float:
        return max(self._parts(first, end, steps)) + steps * self.efficiency.step_s


@dataclass(frozen=True, slots=True)
class DecodeRoofline:
    model: ModelFacts
    gpu: Gpu
    efficiency: Efficiency
    source: str = "roofline"

    def step_s(self, rows: float, context: float) -> float:
        return max(self._parts(rows, context)) + self.efficiency.step_s

    def why(self, rows: float, context: float) -> str:
        weights, kv = self.model.read_bytes(rows), rows * self.model.kv_read_bytes(context)
        compute_s, read_s = self._parts(rows, context)
        return (
            f"{weights / GB:.3g} GB of weights and {kv / GB:.3g} GB of KV take {duration(read_s)} "
            f"to read at {self._rate / GB:.0f} GB/s, and the arithmetic {duration(compute_s)}"
        )

    def bound(self, rows: float, context: float) -> str:
        compute_s, read_s = self._parts(rows, context)
        return "compute" if compute_s > read_s else "bandwidth"

    @property
    def _rate(self) -> float:
        return self.gpu.bandwidth * self.efficiency.bandwidth

    def _parts(self, rows: float, context: float) -> tuple[float, float]:
        read = self.model.read_bytes(rows) + rows * self.model.kv_read_bytes(context)
        flops = self.gpu.flops * self.efficiency.compute
        return self.model.decode_flops(rows, context) / flops, read / self._rate


@dataclass(frozen=True, slots=True)
class MeasuredPrefill:
    speed: WorkerSpeed
    source: str = "measured"

    @property
    def step_tokens(self) -> int:
        return self.speed.prefill_step_tokens

    def alone_s(self, first: int, end: int) -> float:
        return self.speed.prefill_s(first, end)

    def busy_s(self, first: int, end: int) -> float:
        return self.alone_s(first, end)

    def why(self, first: int, end: int) -> str:
        return f"{end - first} tokens, by what prefill workers measured"


@dataclass(frozen=True, slots=True)
class MeasuredDecode:
    speed: WorkerSpeed
    source: str = "measured"

    def step_s(self, rows: float, context: float) -> float:
        return self.speed.decode_s(rows, rows * context)

    def why(self, rows: float, context: float) -> str:
        return f"{context:.0f} positions of context, by what decode workers measured"


def duration(seconds: float) -> str:
    """Formats a duration."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"
