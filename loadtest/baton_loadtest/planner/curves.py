"""How long prefill and decode take, by a roofline or as workers measured it.

A roofline is a bound: a step takes as long as its arithmetic or as what it reads, whichever is
longer, at a stated share of what the data sheet says, and a constant besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.core.routing.load import WorkerSpeed
from baton_loadtest.planner.facts import ModelFacts
from baton_loadtest.planner.gpus import GB, Gpu


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
