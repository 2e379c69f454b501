"""Compiles the Triton kernels for a GPU that need not be there, and says what they take of it.

Run as a program, because a process that interprets kernels cannot compile them:
    python compiling.py CAPABILITY SHARED_BYTES DTYPE PER_HEAD KEY_SIZE VALUE_SIZE WINDOW SOFTCAP \
        LATENT KEPT
prints JSON: for each kernel its shared memory, its stack (which holds what registers cannot) and
the matrix instructions in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batonlm.engine.adapters import grouped
from batonlm.engine.attention.triton import copies, decode, leaf_hash, prefill, shapes
from batonlm.engine.fused import experts
from batonlm.engine.fused import kernels as fused

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FLOAT32 = {"tops", "totals", "outputs", "shares", "inner"}
_INT64 = {"row_powers", "lane_powers", "found", "table"}
_OF_MODEL = {
    "query",
    "target",
    "sinks",
    "source_keys",
    "source_values",
    "hidden",
    "rows",
    "bias",
    "parts",
    "logits",
    "delta",
    "weight",
    "output",
    "merged",
    "query_norm",
    "key_norm",
    "cosines",
    "sines",
}


_KEPT = {"keys", "values", "wire"}


def _type(name: str, dtype: str, kept: str) -> str:
    if name in _KEPT:
        return "*" + kept
    if name in _OF_MODEL:
        return "*" + dtype
    if name in _FLOAT32:
        return "*fp32"
    if name in _INT64:
        return "*i64"
    if name in ("scale", "epsilon", "alpha", "limit"):
        return "fp32"
    counts = "count", "pairs", "first_head", "wire_heads", "height", "width"
    whole = name in counts or name.endswith("_stride")
    return "i32" if whole else "*i32"


def compiled(
    kernel: Any,
    dtypes: tuple[str, str],
    constants: dict[str, Any],
    capability: int,
    warps: int,
    stages: int,
) -> dict[str, Any]:
    """dtypes: the model's, and the one that KV is kept in."""
    names = kernel.arg_names
    types = {name: _type(name, *dtypes) for name in names}
    if constants.get("ROUNDED"):
        types |= {"weight": "*fp8e4nv", "scales": "*fp32"}
    if kernel is grouped._up:
        types["outputs"] = "*i32"
    whole = {name for name, kind in types.items() if kind[0] == "*" or "str" in name} | {"width"}
    aligned = [name for name in names if name in whole and name not in constants]
    source = ASTSource(
        kernel,
        signature={n: "constexpr" if n in constants else t for n, t in types.items()},
        constexprs={(names.index(n),): v for n, v in constants.items() if n in names},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages}
    result = triton.compile(source, target=target, options=options)
    instructions = [i for i in ("wgmma", "mma.sync") if i in result.asm["ptx"]]
    return {
        "shared": result.metadata.shared,
        "stack": stack(result.asm["cubin"]),
        "instructions": instructions,
    }


def stack(cubin: bytes) -> int:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(program), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1])


def _fused(head_size: int) -> dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]]:
    """The fused decoder's kernels, of a large model; heads turn in whole and in part."""

    def warps(count: int) -> shapes.TileShape:
        return shapes.TileShape(rows=fused.ROWS, keys=0, warps=count, stages=3)

    wide = 8192
    heads = {"QUERIES": 32, "KV_HEADS": 8, "ROWS": fused.ROWS, "NORMS": True, "WIDE_SCALE": False}
    found = {
        "add and norm": (
            fused._add_norm,
            warps(fused.norm_warps(wide)),
            {"SIZE": wide, "PADDED": wide, "ADDS": True, "WIDE_SCALE": False},
        ),
        "gate": (fused._gate, warps(4), {"SIZE": 3 * wide, "ELEMENTS": fused.ELEMENTS}),
    }
    for name, rotated in (("place", head_size), ("place in part", head_size // 2)):
        constants = fused.head_constants(head_size, rotated)
        found[name] = fused._place, warps(fused.WARPS), {**heads, **constants}
    return found


def _experts(
    item_bytes: int, capability: int
) -> dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]]:
    """Those of mixtures: of Qwen3-30B-A3B's shape, and GPT-OSS-20B's where it is another."""

    def shape(warps: int, stages: int) -> shapes.TileShape:
        return shapes.TileShape(rows=0, keys=0, warps=warps, stages=stages)

    qwen = {"EXPERTS": 128, "EXPERTS_PADDED": 128, "CHOICES": 8, "CHOICES_PADDED": 16}
    size = {"ELEMENTS": experts.ELEMENTS, "SIZE": 2048}
    found: dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]] = {
        "route": (experts._route, shape(1, 3), {**qwen, "NORMALISED": True}),
        "sort": (experts._sort, shape(4, 3), {"EXPERTS": 128, "PAIRS": experts.PAIRS}),
        "combine": (experts._combine, shape(4, 3), {**qwen, **size}),
        "clamped gate": (experts._clamped_gate, shape(4, 3), size),
    }
    oss = {"EXPERTS": 32, "EXPERTS_PADDED": 32}
    plain = {**qwen, "INPUTS": 2048, "OUTPUTS": 1536, "TRANSPOSED": False, "BIASED": False}
    plain["ROUNDED"] = False
    turned = {**oss, "INPUTS": 2880, "OUTPUTS": 5760, "TRANSPOSED": True, "BIASED": True}
    turned["ROUNDED"] = False
    forms = {"experts": plain, "turned experts": turned}
    if capability >= 89:
        # GPUs before have no such numbers.
        rounded = {f"{name} in fp8": {**own, "ROUNDED": True} for name, own in forms.items()}
        forms |= rounded
    for pairs, some in ((64, "few"), (16384, "many")):
        tile = experts.tile_for(pairs, 128, item_bytes, exact=False)
        own = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "PER_ROW": 8}
        for form, constants in forms.items():
            taken = shape(tile.warps, tile.stages)
            found[f"{form}, {some}"] = experts._multiply, taken, {**constants, **own}
    return found


def _adapters(item_bytes: int) -> dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]]:
    """Those of adapters, in the two ways of the widest products of an 8B Llama's layer."""
    found: dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]] = {}
    for some, tile in zip(("few", "many"), grouped.tiles_for(item_bytes), strict=True):
        taken = shapes.TileShape(rows=0, keys=0, warps=tile.warps, stages=tile.stages)
        own = {"ROWS": tile.rows, "RANKS": tile.ranks, "INNER": tile.inner, "SLOT": 224 * 12}
        split, splits = grouped.split_of(14336, tile.inner)
        down = {**own, "INPUTS": 14336, "SPLIT": split}
        up = {**own, "OUTPUTS": 28672, "COLUMNS": tile.columns, "ALIGNED": 16}
        for how, sums in (("apart", splits), ("together", 1)):
            each = {"SUMS": sums, "TOGETHER": splits // sums}
            found[f"adapters' down, {some}, {how}"] = grouped._down, taken, {**down, **each}
            found[f"adapters' up, {some}, {how}"] = grouped._up, taken, {**up, **each}
        odd = {**up, "SUMS": 1, "OUTPUTS": 101, "ALIGNED": 1}
        found[f"odd sizes, adapters' up, {some}"] = grouped._up, taken, odd
    return found


def main(arguments: list[str]) -> None:
    capability, shared_bytes = int(arguments[0]), int(arguments[1])
    dtype, per_head = arguments[2], int(arguments[3])
    dtypes = dtype, arguments[9]
    key_size, value_size, window = map(int, arguments[4:7])
    latent = arguments[8] == "True"
    split = 1
    sizes = key_size, value_size, _ITEM_BYTES[dtype], shared_bytes
    if latent:
        together = shapes.latent_heads(per_head, *sizes)
        split, per_head = per_head // together, together
    small = shapes.decode_shape(per_head, *sizes, latent=latent)
    large = shapes.prefill_shape(per_head, *sizes, latent=latent, scaled=dtypes[1] in ("u8", "i8"))
    # Of latents, no values are kept.
    kept = {"VALUE_SIZE": 0, "KEY_PADDED": shapes.padded(key_size)} if latent else {}
    kernels: dict[str, tuple[Any, shapes.TileShape, dict[str, Any]]] = {
        "decode": (decode._decode, small, {}),
        "merge": (decode._merge, small, {}),
        "prefill": (prefill._prefill, large, {"NESTED": False}),
        "exact prefill": (prefill._prefill, small, {"NESTED": True}),
        "write": (copies._write, small, kept),
        "pack": (copies._wire, small, {"PACKING": True, **kept}),
        "unpack": (copies._wire, small, {"PACKING": False, **kept}),
        **({} if latent else {**_fused(key_size), **_experts(_ITEM_BYTES[dtype], capability)}),
        **({} if latent else _adapters(_ITEM_BYTES[dtype])),
    }
    report = {}
    for name, (kernel, shape, own) in kernels.items():
        constants = {
            "PER_HEAD": per_head,
            "ROWS": shape.rows,
            "POSITIONS": shape.positions(per_head),
            "PARTS": 33,
            "KEY_SIZE": key_size,
            "KEY_PADDED": shapes.padded(key_size - value_size if latent else key_size),
            "VALUE_SIZE": value_size,
            "VALUE_PADDED": shapes.padded(value_size),
            "BLOCK_SIZE": 16,
            "LATENT": latent,
            "SPLIT": split,
            "KEYS": shape.keys,
            "WINDOW": window,
            "SOFTCAP": float(arguments[7]),
            "SINKS": window > 0,
            "UNROLLED": decode._UNROLLED,
            "PLACES": copies._PLACES,
            **own,
        }
        constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
        report[name] = compiled(kernel, dtypes, constants, capability, shape.warps, shape.stages)
    words = {"LANES": leaf_hash._LANES, "ROWS": leaf_hash._ROWS}
    report["leaf hash"] = compiled(
        leaf_hash._leaves, dtypes, words, capability, leaf_hash._WARPS, 3
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
