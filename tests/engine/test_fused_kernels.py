"""The fused decoder's kernels against torch's operators, and whole models over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from batonlm.core.request.model import SCALED_FP8, SCALED_INT8, KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.interface import LayerArguments
from batonlm.engine.attention.triton.backend import TritonBackend
from batonlm.engine.fused.decoder import Decoder, Heads, PlainOperators, Rotation
from batonlm.engine.fused.kernels import TritonOperators
from batonlm.engine.fused.recipe import Recipe, read_recipe
from batonlm.engine.kv.cache import DTYPES, recoded
from batonlm.engine.loader import AttentionShape, run_network
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import scattered
from tests.engine.test_fused import COVERED, opened, steps
from tests.engine.tiny_models import save_tiny_model

ON = pytest.mark.parametrize("device", [INTERPRETER, CUDA])
# One step of a number type: sums are made in another order than torch's.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ROWS = 7


@pytest.fixture(autouse=True)
def nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions to bfloat16 round to the nearest, as on a GPU; the interpreter's cut bits off."""
    convert: Any = interpreter._convert_float

    def rounding(source: Any, source_type: Any, target_type: Any, mode: Any) -> Any:
        if source_type != tl.float32 or target_type != tl.bfloat16:
            return convert(source, source_type, target_type, mode)
        nearest = torch.from_numpy(np.array(source, np.float32)).to(torch.bfloat16)
        return nearest.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


def recipe(*, wide_scale: bool = False, head_size: int = 64) -> Recipe:
    return Recipe(head_size, 2, 1e-5, wide_scale, (), ())


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).to(dtype).to(device)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    limit = CLOSE[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


@ON
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("wide_scale", [False, True])
@pytest.mark.parametrize("size", [64, 200])
def test_norms_and_gates(device: str, dtype: torch.dtype, wide_scale: bool, size: int) -> None:
    kernels = TritonOperators(recipe(wide_scale=wide_scale))
    plain = PlainOperators(recipe(wide_scale=wide_scale))
    hidden, delta = (random(ROWS, size, dtype=dtype, device=device, seed=i) for i in range(2))
    weight = random(size, dtype=dtype, device=device, seed=2)
    close(kernels.norm(hidden, weight), plain.norm(hidden, weight))
    own, others = hidden.clone(), hidden.clone()
    close(kernels.add_norm(own, delta, weight), plain.add_norm(others, delta, weight))
    assert torch.equal(own, others)
    merged = torch.cat((hidden, delta), 1)
    close(kernels.gate(merged), plain.gate(merged))


@dataclass(frozen=True)
class Case:
    head_size: int = 64
    rotated: int = 64
    """Elements of a head that are rotated; 0 is none."""
    norms: bool = False
    wide_scale: bool = False
    dtype: str = "float32"
    queries: int = 4
    kv_heads: int = 2
    kept: str = ""
    """The type that KV is kept in; "" is dtype."""


CASES = (
    Case(),
    Case(norms=True, dtype="bfloat16"),
    Case(norms=True, wide_scale=True, dtype="float16", queries=3, kv_heads=1),
    Case(head_size=80, rotated=80, dtype="bfloat16"),
    Case(head_size=80, rotated=48, norms=True),
    Case(rotated=0, norms=True),
    Case(kept=SCALED_FP8),
    Case(kept=SCALED_INT8),
    Case(head_size=80, rotated=48, norms=True, dtype="bfloat16", kept=SCALED_INT8),
    Case(head_size=80, rotated=48, norms=True, dtype="bfloat16", kept=SCALED_FP8),
)


@ON
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_heads_are_normalised_rotated_and_placed(device: str, case: Case) -> None:
    """Outputs and all of memory: nothing is written but the rows' own places."""
    dtype, size = DTYPES[case.dtype], case.head_size
    layout = KvLayout("d", case.kept or case.dtype, 2, case.kv_heads, size, size)
    shape = AttentionShape(
        layout, case.dtype, layout.dtype, case.queries // case.kv_heads, softcap=False
    )
    norms = [random(size, dtype=dtype, device=device, seed=i) for i in (3, 4)]
    heads = Heads(
        LayerArguments(1, size**-0.5, None, None, None),
        case.queries,
        case.kv_heads,
        norms[0] if case.norms else None,
        norms[1] if case.norms else None,
        case.rotated > 0,
    )
    angles = random(ROWS, (case.rotated or size) // 2, dtype=dtype, device=device, seed=5)
    cosines, sines = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cosines, cosines), 1), torch.cat((-sines, sines), 1))
    width = (case.queries + 2 * case.kv_heads) * size
    merged = random(ROWS, width, dtype=dtype, device=device, seed=6)
    tables = scattered(2, 2)
    plan = StepPlan(0, (Chunk(0, [1] * 6, 0, tables[0]), Chunk(1, [1], 0, tables[1])))
    outputs, memories = [], []
    for operators in (TritonOperators, PlainOperators):
        backend = TritonBackend(
            shape, 4, 16, torch.device(device), max_model_len=32, max_batch=2, exact=False
        )
        memory = backend.memory
        # NaN as floats; codes with a scale of infinity.
        memory.storage.view(torch.uint8).fill_(255)
        context = backend.begin(plan).context
        assert context is not None
        made = operators(recipe(wide_scale=case.wide_scale, head_size=size))
        outputs.append(made.attend(context, heads, merged.clone(), rotation))
        parts = recoded((memory.keys, memory.values, *memory.scales), dtype)
        memories.append(torch.cat([part.flatten() for part in parts]))
    assert torch.equal(memories[0].isnan(), memories[1].isnan())
    one, other = (memory.nan_to_num() for memory in memories)
    if case.kept:
        # Few are so near to the middle of two codes that a last bit before it decides.
        assert float((one != other).float().mean()) < 0.02
        torch.testing.assert_close(one, other, rtol=2**-3, atol=1e-3)
    else:
        close(one, other)
    limit = 5 * CLOSE[dtype]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=limit, atol=limit)


@ON
@pytest.mark.parametrize(
    "arch",
    # With experts, the interpreter takes long; their kernels have tests of their own.
    [pytest.param(a, marks=pytest.mark.deep) if a == "qwen3_moe" else a for a in COVERED],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(
    arch: str, device: str, saved: Callable[[str], Path]
) -> None:
    plans = steps((1, 6, 3), 30)
    own, _, reference = opened(saved(arch), attention="reference")
    wanted = [run_network(own.network, reference.begin(plan)) for plan in plans]
    loaded, shape, backend = opened(saved(arch), attention="triton", device=device)
    # Positions that never were computed are zeros in the reference, too.
    decoder = decoder_of(loaded.network, shape)
    for plan, logits in zip(plans, wanted, strict=True):
        got = run_network(decoder, backend.begin(plan))
        torch.testing.assert_close(got.cpu(), logits, rtol=1e-4, atol=1e-4)


def decoder_of(network: Any, shape: AttentionShape) -> Decoder:
    found = read_recipe(network, shape.layers)
    return Decoder(network, found, TritonOperators(found))


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Counts what a GPU would run: operators that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().removeprefix("aten::")
        if not func.is_view and "empty" not in name and name != "detach":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what is launched. Kernels are counted and not run."""
    counting = Launches()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        counting.names.append(self.fn.__name__)

    with monkeypatch.context() as patched:
        patched.setattr(interpreter.GridExecutor, "__call__", launch)
        with counting:
            yield counting.names


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of the interpreter")
@pytest.mark.parametrize(
    ("arch", "expected"),
    [("llama", 10), ("qwen3", 10), ("phi3", 10), ("mixtral", 14), ("qwen3_moe", 14)],
)
@torch.inference_mode()
def test_a_layer_takes_few_launches(
    arch: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that makes the host wait for a GPU."""
    counts = []
    for layers in (1, 3):
        kinds: dict[str, Any] = {}
        if arch == "qwen3":
            kinds["layer_types"] = ["full_attention"] * layers
        place = tmp_path / str(layers)
        folder = save_tiny_model(arch, place, num_hidden_layers=layers, **kinds)
        loaded, shape, backend = opened(folder, attention="triton")
        decoder = decoder_of(loaded.network, shape)
        inputs = backend.decode_buffers(4)(StepPlan(0, ()), 4)
        with launches(monkeypatch) as names:
            run_network(decoder, inputs)
        assert not {"_local_scalar_dense", "nonzero", "item", "is_nonzero"} & set(names)
        counts.append(len(names))
    assert counts[1] - counts[0] == 2 * expected, names
