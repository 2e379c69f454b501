"""Compiles the sampler's kernels for a GPU that need not be there: python compiling_sampler.py
CAPABILITY prints JSON: for each its shared memory, its stack and its instructions that round
otherwise than single IEEE operations do. A program, because a process that interprets kernels
cannot compile."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batonlm.engine import sampler_triton
from batonlm.engine.sampler_cpu import scale_bits
from tests.engine.compiling import stack

TYPES = {
    "logits": "*bf16",
    "counts": "*i32",
    "numbers": "*fp64",
    "settings": "*i32",
    "bias_tokens": "*i32",
    "biases": "*fp32",
    "banned": "*i32",
    "masks": "*u8",
    "scratch": "*fp32",
    "tokens": "*i64",
    "logits_stride": "i32",
    "vocab": "i32",
    "best": "*fp32",
    "total": "*i64",
}


def compiled(kernel: Any, capability: int) -> dict[str, Any]:
    names = kernel.arg_names
    types = {name: TYPES[name] for name in names if name in TYPES}
    if kernel is sampler_triton._sum:
        types["logits"] = "*fp32"
    constants = {
        "BITS": scale_bits(128256),
        "TILE": sampler_triton.TILE,
        "CANDIDATES": sampler_triton.CANDIDATES,
    }
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(n),): value for n, value in constants.items() if n in names},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    result = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": sampler_triton.WARPS, "enable_fp_fusion": False},
    )
    inexact = r"\bfma\.\S+|\bmad\.\S*f\d+|\S+\.ftz\S*|div\.full\S*|\S+\.approx\S*"
    return {
        "shared": result.metadata.shared,
        "stack": stack(result.asm["cubin"]),
        "inexact": sorted(set(re.findall(inexact, result.asm["ptx"]))),
    }


def main(capability: int) -> None:
    kernels = {"sample": sampler_triton._sample, "sum": sampler_triton._sum}
    print(json.dumps({name: compiled(kernel, capability) for name, kernel in kernels.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
