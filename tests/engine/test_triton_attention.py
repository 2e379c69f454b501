"""Triton's attention against its definition, and bit by bit against itself in other batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from batonlm.core.request.model import SCALED, SCALED_FP8, SCALED_INT8
from batonlm.engine.attention.triton import decode, shapes
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.machine import check_interpreter
from tests.engine.paged import Case, Paged

FLOAT32_ERROR = 2e-6
"""Of sums of products, and of exponentials of them, in float32."""

CASES = {
    "plain": Case(),
    "one_head_each": Case(per_head=1, kv_heads=2, spans=((0, 17), (250, 258))),
    "three_heads_80": Case(per_head=3, key_size=80, value_size=80, spans=((30, 37), (258, 270))),
    "four_heads_96": Case(per_head=4, key_size=96, value_size=96, spans=((0, 20), (60, 65))),
    "eight_heads_128": Case(per_head=8, key_size=128, value_size=128, spans=((0, 6), (60, 70))),
    "size_256": Case(key_size=256, value_size=256, spans=((0, 9), (30, 40))),
    "mla": Case(per_head=1, kv_heads=3, key_size=24, value_size=16, spans=((0, 20), (258, 260))),
    "latent": Case(24, 1, 56, 40, latent=True, spans=((0, 5), (250, 258))),
    "latent_window": Case(5, 1, 80, 64, 24, latent=True, spans=((0, 20), (258, 260))),
    "window": Case(window=24),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True, spans=((0, 3), (40, 50), (265, 270))),
    "everything": Case(3, 2, 80, 48, 100, 3.0, True, "float32", 32, ((34, 40), (275, 280))),
}

SLOW_CASES = {
    f"{per_head}x{size}": Case(
        per_head, 2, size, size, block_size=32, spans=((0, 5), (0, 64), (250, 260), (500, 600))
    )
    for per_head in (1, 3, 4, 8)
    for size in (64, 80, 96, 128, 256)
}


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mends the interpreter, which keeps bfloat16 as the whole numbers of its bits: it multiplies
    these, and cuts float32 off where a GPU rounds to the nearest. Products of bfloat16 are exact
    in float32, and their sums are float32 on a GPU, too."""
    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        return multiply(self, widened(a), widened(b), *others)

    def rounding(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding)


def check(case: Case, device: str, *, exact: bool) -> None:
    """In pieces of several sizes and single tokens, all rows equal the definition.

    Queries, keys and values are given in the case's type, and their products are exact in float32.
    What is rounded to a type of 8 or 11 bits is each weight, once, before it multiplies a value,
    and the output: each by at most half of the type's epsilon.
    """
    paged = Paged(case, device, exact=exact)
    ends = [1, 4, 33, 34, 35, case.longest - 9, case.longest - 1]
    epsilon = 0.0 if case.dtype == "float32" else torch.finfo(getattr(torch, case.dtype)).eps
    outputs = zip(paged.run(ends), paged.expected(), paged.magnitudes(), strict=True)
    for got, wanted, magnitude in outputs:
        error = (got.double() - wanted).abs()
        rounded = epsilon / 2 * (magnitude + wanted.abs())
        float32 = FLOAT32_ERROR * max(1.0, float(wanted.abs().max()))
        # Errors of scores count for more where the exponential multiplies them.
        assert bool((error <= 1.02 * rounded + 10 * float32 * (epsilon > 0) + float32).all())


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_it_is_defined_to_be(name: str, device: str) -> None:
    check(CASES[name], device, exact=False)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("name", ["plain", "everything", "latent"])
def test_so_is_the_exact_form(name: str, device: str) -> None:
    check(CASES[name], device, exact=True)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "everything", "latent"])
def test_so_are_short_floats(name: str, dtype: str, device: str) -> None:
    check(replace(CASES[name], dtype=dtype), device, exact=False)


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("plain", "everything", "latent")]
)
def test_so_are_all_cases_of_short_floats(name: str, dtype: str, device: str) -> None:
    check(replace(CASES[name], dtype=dtype), device, exact=False)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("kept", SCALED)
@pytest.mark.parametrize(("name", "dtype"), [("everything", "float32"), ("plain", "bfloat16")])
def test_so_is_attention_to_scaled_numbers(name: str, dtype: str, kept: str, device: str) -> None:
    """Against the definition over the numbers that codes and scales stand for."""
    check(replace(CASES[name], dtype=dtype, kept=kept), device, exact=dtype == "float32")


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kept", SCALED)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.latent])
def test_so_is_it_in_all_cases(name: str, kept: str, dtype: str, device: str) -> None:
    check(replace(CASES[name], dtype=dtype, kept=kept), device, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", SLOW_CASES)
def test_all_head_sizes_and_groups(name: str, exact: bool) -> None:
    check(SLOW_CASES[name], "cuda" if torch.cuda.is_available() else "cpu", exact=exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SLOW_CASES)
def test_short_floats_on_the_device(name: str, dtype: str) -> None:
    check(replace(SLOW_CASES[name], dtype=dtype), "cuda", exact=False)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_batch_and_its_blocks_do_not_show_in_any_bit(name: str, device: str) -> None:
    case = CASES[name]
    ends = [36, 37, case.longest - 1]
    together = Paged(case, device, exact=False).run(ends)
    alone = [
        Paged(case, device, exact=False, shift=1).run(ends, only=[i])[0]
        for i in range(len(case.spans))
    ]
    assert equal(together, alone)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("name", ["three_heads_80", "window"])
def test_the_cuts_of_a_prompt_do_not_show_in_any_bit(name: str, device: str) -> None:
    """But for pieces of one token, which are decode's."""
    whole = Paged(CASES[name], device, exact=False).run([])
    assert equal(Paged(CASES[name], device, exact=False).run([3, 33, 260, 267]), whole)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *(("plain", ""), ("everything", ""), ("latent", "")),
        *(("plain", SCALED_INT8), ("everything", SCALED_FP8)),
    ],
)
def test_in_the_exact_form_tokens_one_by_one_have_the_bits_of_a_chunk(
    name: str, kept: str, device: str
) -> None:
    check_interpreter(device)
    case = replace(CASES[name], spans=((28, 36), (252, 260)), kept=kept)
    whole = Paged(case, device, exact=True).run([])
    one_by_one = [*range(29, 37), *range(253, 261)]
    assert equal(Paged(case, device, exact=True).run(one_by_one), whole)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize(
    "name",
    ["plain", *(pytest.param(name, marks=pytest.mark.deep) for name in ("everything", "latent"))],
)
def test_drafts_have_the_bits_of_tokens_one_by_one(name: str, device: str) -> None:
    """In the form that is not exact, too: they are computed as these are."""
    case = replace(CASES[name], spans=((28, 36), (14, 15), (252, 260)))
    drafted = Paged(case, device, exact=False, drafts=True).run([33])
    assert equal(drafted, Paged(case, device, exact=False).run(range(15, 261)))


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences_are_cut_into_larger_parts(
    device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With at most three parts, one of the 530 positions has 512, or of 300 seen ones 256."""
    monkeypatch.setattr(shapes, "most_parts", lambda *_: 3)
    case = Case(window=window, spans=((200, 203), (508, 520)))
    check(case, device, exact=False)
    check_interpreter(device)
    whole = Paged(case, device, exact=True).run([])
    assert equal(Paged(case, device, exact=True).run(range(510, 520)), whole)


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_it_does_not_matter_how_many_programs_share_a_sequence(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(spans=((39, 40), (598, 600)))
    wanted = Paged(case, device, exact=False).run([599])
    monkeypatch.setattr(decode, "_PROGRAMS", 1)
    assert equal(Paged(case, device, exact=False).run([599]), wanted)


# The interpreter's maximum of nothing but NaN is a warning of numpy's.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_a_sequence_of_no_numbers_spoils_no_other(device: str) -> None:
    def run(*, spoiled: bool) -> list[torch.Tensor]:
        paged = Paged(Case(spans=((0, 5), (0, 20), (30, 38))), device, exact=False)
        if spoiled:
            paged.sequences[1].key.fill_(torch.nan)
            paged.sequences[1].value.fill_(torch.inf)
        return paged.run([19])

    wanted, got = run(spoiled=False), run(spoiled=True)
    assert equal([got[0], got[2]], [wanted[0], wanted[2]])
    assert bool(got[1].isnan().all())
