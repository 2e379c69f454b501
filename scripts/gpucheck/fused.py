"""The fused decoder's kernels against torch's operators, and how near they come to the memory.

What is done to heads ahead of attention needs a whole model: `parity` and the check at load hold
that against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from baton_loadtest.report import Result, at_most
from batonlm.engine.fused.decoder import Operators, PlainOperators
from batonlm.engine.fused.kernels import TritonOperators
from batonlm.engine.fused.recipe import Recipe
from gpucheck.ceilings import READ
from gpucheck.check import Check
from gpucheck.figures import LLAMA_8B, TINY
from gpucheck.timing import seconds

_LIMITS = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""One step of each number type: sums are made in another order than torch's."""

Call = Callable[[Operators], torch.Tensor]


def run(check: Check) -> Iterator[Result]:
    """Errors in every number type, then bytes a second at decode's and prefill's rows."""
    shape = LLAMA_8B if check.on_gpu else TINY
    for kind in _LIMITS if check.on_gpu else ("float32",):
        dtype = getattr(torch, kind)
        for wide_scale in (False, True):
            recipe = Recipe(shape.head_size, 4, 1e-5, wide_scale, (), ())
            ours, plain = TritonOperators(recipe), PlainOperators(recipe)
            calls = _calls(7, shape.hidden, shape.intermediate, dtype, check.device)
            for name, (call, _) in calls.items():
                got, wanted = call(ours).double(), call(plain).double()
                error = float(((got - wanted).abs() / wanted.abs().clamp_min(1.0)).max())
                title = f"{name} error, {kind}" + (", wide scale" if wide_scale else "")
                yield at_most(title, error, "", _LIMITS[kind])
    dtype = torch.bfloat16 if check.on_gpu else torch.float32
    ours = TritonOperators(Recipe(shape.head_size, 4, 1e-5, False, (), ()))
    for rows in (64, 2048) if check.on_gpu else (3,):
        calls = _calls(rows, shape.hidden, shape.intermediate, dtype, check.device)
        for name, (call, moved) in calls.items():
            taken = seconds(partial(call, ours), check.device, 15 if check.on_gpu else 1)
            yield Result(f"{name}, {rows} rows", taken * 1e6, "µs")
            yield check.speed(f"{name}, {rows} rows, memory traffic", moved / taken, "B/s", READ)


def _calls(
    rows: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Call, int]]:
    """By name, an operator on random numbers and the bytes that it has to move."""

    def random(*sizes: int) -> torch.Tensor:
        return (3 * torch.randn(*sizes, device=device)).to(dtype)

    inputs, delta, weight = random(rows, hidden), random(rows, hidden), random(hidden)
    halves = random(rows, 2 * intermediate)
    one, gated = inputs.nbytes, halves.nbytes
    return {
        "norm": (lambda operators: operators.norm(inputs, weight), 2 * one),
        "add and norm": (
            # It adds in place.
            lambda operators: operators.add_norm(inputs.clone(), delta, weight),
            6 * one,
        ),
        "gate": (lambda operators: operators.gate(halves), gated + gated // 2),
    }
