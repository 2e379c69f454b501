"""How long prefill and decode take, by a roofline or as workers measured it.

A roofline is a bound: a step takes as long as its arithmetic or as what it reads, whichever is
longer, at a stated share of what the data sheet says, and a constant besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import InvalidArgument
from baton.core.routing.load import WorkerSpeed

# What data sheets say of GPUs, for rooflines.
#
# A data sheet's figure is what the device cannot exceed, not what anything reaches.


GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. flops: dense, of bfloat16 with float32 sums, a second. bandwidth: bytes a second
    of its memory. link: bytes a second to its host one way, which no network card beside it can
    outdo; 0: not said.

    memory: bytes. A sheet's gigabytes count as 10**9, though some devices have 2**30: so a plan
    never promises memory that is not there.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float = 0.0


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
"""The SXM or OAM form where the name does not say another."""


def known(name: str) -> Gpu:
    """Takes no notice of case, spaces and dashes. Raises InvalidArgument that lists the names."""
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


# ModelFacts, what a token of a model computes, reads and leaves behind.
#
# Counts multiplications and bytes of weights and KV. What else a layer does (norms, rotations, the
# activations that are written and read) is small beside them, and is left to the efficiency that
# a roofline is given.


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


class PrefillCurve(Protocol):
    """Seconds for the positions from `first` to before `end` of one prompt."""

    @property
    def source(self) -> str:
        """roofline or measured."""

    @property
    def step_tokens(self) -> int:
        """Positions of a step at most; 0: any."""

    def alone_s(self, first: int, end: int) -> float:
        """With the worker to itself."""

    def busy_s(self, first: int, end: int) -> float:
        """That it keeps a worker busy while its steps are filled up by other prompts."""

    def why(self, first: int, end: int) -> str:
        """What `alone_s` is made of."""


class DecodeCurve(Protocol):
    @property
    def source(self) -> str:
        """roofline or measured."""

    def step_s(self, rows: float, context: float) -> float:
        """One step of so many sequences that have so many positions each. Grows with both."""

    def why(self, rows: float, context: float) -> str:
        """What `step_s` is made of."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of a data sheet's figures. step_s: of every step, besides."""

    compute: float
    bandwidth: float
    step_s: float


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
    """In words."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"
