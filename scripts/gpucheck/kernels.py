"""Our Triton attention against float64 arithmetic on the same GPU, and its memory traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from baton_loadtest.report import Result
from batonlm.core.request.model import KvLayout
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.attention.interface import AttentionContext, LayerArguments
from batonlm.engine.attention.triton.backend import TritonBackend
from batonlm.engine.loader import AttentionShape
from gpucheck.ceilings import MATMUL, READ
from gpucheck.check import Check, Skip
from gpucheck.definition import attention
from gpucheck.timing import give_back, seconds

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """One layer's attention. window, softcap, sinks: as models have them."""

    name: str
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case("llama"),
    Case("odd head", heads=12, kv_heads=4, size=80),
    Case("wide head", heads=8, kv_heads=4, size=256, softcap=50.0),
    Case("window", window=100),
    Case("sinks", heads=64, kv_heads=8, size=64, window=128, sinks=True),
    Case("one KV head", heads=8, kv_heads=1),
)
Parts = Sequence[tuple[int, int]]
# Of each sequence, how many positions have KV and how many are computed now.
PARTS: Parts = ((0, 40), (515, 1), (300, 70), (16, 1), (0, 1), (1023, 1))
SMALL_PARTS: Parts = ((0, 20), (17, 1), (30, 5))
"""The same of a rehearsal, whose interpreter takes seconds for a step of PARTS."""
# Relative errors of a sound kernel, see the bounds of bfloat16's and float32's own rounding.
_LIMITS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}


def correctness(check: Check) -> Iterator[Result]:
    """Relative error of steps that mix chunks and single tokens, over fragmented blocks, and of a
    round trip through the wire's layout. The part names number type and case."""
    kind, _, name = check.part.partition(", ")
    if kind == "bfloat16" and not check.on_gpu:
        raise Skip("Triton's interpreter cannot multiply bfloat16")
    case, parts = next(case for case in CASES if case.name == name), PARTS
    if not check.on_gpu:
        case, parts = _small(case), SMALL_PARTS
    error = error_of(case, kind, check.device, parts)
    yield _at_most(f"attention error, {kind}, {name}", error, _LIMITS[kind])
    yield _at_most(f"copies, {kind}, {name}", _copies_differ(case, kind, check.device), 0)


def speed(check: Check) -> Iterator[Result]:
    """One layer's attention alone: decode against the memory's bandwidth, prefill against the rate
    of products."""
    case = CASES[0] if check.on_gpu else _small(CASES[0])
    kind = "bfloat16" if check.on_gpu else "float32"
    shapes = ((1, 8192), (64, 1024), (64, 8192), (1, 32768)) if check.on_gpu else ((2, 40),)
    for batch, context in shapes:
        taken = _step_seconds(case, kind, check.device, [(context - 1, 1)] * batch)
        moved = 2 * batch * context * case.kv_heads * case.size * _bytes(kind)
        name = f"decode attention, batch {batch}, {context} positions"
        yield check.speed(name, moved / taken, "B/s", READ)
    chunks = ((2048, 0), (2048, 6144), (2048, 30720)) if check.on_gpu else ((32, 16),)
    for count, before in chunks:
        taken = _step_seconds(case, kind, check.device, [(before, count)])
        pairs = count * before + count * (count + 1) // 2
        done = 4 * case.heads * case.size * pairs
        name = f"prefill attention, {count} tokens after {before}"
        yield check.speed(name, done / taken, "FLOP/s", MATMUL)


def _small(case: Case) -> Case:
    """For a rehearsal: the same kind of case with few and small heads."""
    window = case.window and 20
    return replace(case, heads=4, kv_heads=min(2, case.kv_heads), size=16, window=window)


def _at_most(name: str, error: float, limit: float) -> Result:
    return Result(name, error, "of norm" if limit else "numbers", goal=limit, met=error <= limit)


def _step_seconds(case: Case, kind: str, device: str, parts: list[tuple[int, int]]) -> float:
    """Of one layer's attention. parts: of each sequence, as in PARTS."""
    longest = max(map(sum, parts))
    backend, layout = _backend(case, kind, len(parts), longest, device)
    blocks = -(-longest // BLOCK)
    chunks = tuple(
        Chunk(i, [0] * count, before, ((i * blocks, blocks),))
        for i, (before, count) in enumerate(parts)
    )
    backend.memory.storage.normal_()
    step = _begin(backend, chunks)
    query, key, value = _inputs(case, layout, sum(count for _, count in parts), device)
    arguments = _arguments(case, None)
    taken = seconds(
        lambda: step(arguments, query, key, value), device, 15 if device == "cuda" else 1
    )
    give_back(device)
    return taken


def _copies_differ(case: Case, kind: str, device: str) -> int:
    """How many numbers a payload changes that goes into scattered blocks and out of others' way."""
    count = 75
    blocks = -(-count // BLOCK)
    backend, layout = _backend(case, kind, 2, blocks * BLOCK, device)
    table = tuple((2 * j + 1, 1) for j in reversed(range(blocks)))
    payload = torch.randn(count * layout.bytes_per_position // _bytes(kind)).to(
        getattr(torch, kind)
    )
    given = memoryview(bytearray(payload.view(torch.uint8).numpy()))
    got = memoryview(bytearray(len(given)))
    backend.memory.unpack(table, 0, count, given)
    backend.memory.pack(table, 0, count, got)
    return sum(a != b for a, b in zip(given, got, strict=True))


def _bytes(kind: str) -> int:
    return torch.finfo(getattr(torch, kind)).bits // 8


def error_of(case: Case, kind: str, device: str, parts: Parts) -> float:
    """The relative error of one layer's step. parts: as PARTS."""
    torch.manual_seed(5)
    blocks = -(-max(map(sum, parts)) // BLOCK)
    backend, layout = _backend(case, kind, len(parts), blocks * BLOCK, device)
    sinks = torch.randn(case.heads, device=device) if case.sinks else None
    arguments = _arguments(case, sinks)
    chunks, history = [], []
    for i, (before, count) in enumerate(parts):
        # Blocks of all sequences are interleaved, in falling order.
        table = tuple((j * len(parts) + i, 1) for j in reversed(range(blocks)))
        chunks.append(Chunk(i, [0] * count, before, table))
        past = _inputs(case, layout, before + count, device)
        history.append(past)
        if before:
            step = _begin(backend, (Chunk(i, [0] * before, 0, table),))
            step(arguments, *(t[:, :before] for t in past))
    counts = [count for _, count in parts]
    now = [
        torch.cat([past[:, -count:] for past, count in zip(one, counts, strict=True)], 1)
        for one in zip(*history, strict=True)
    ]
    step = _begin(backend, tuple(chunks))
    got = step(arguments, now[0], now[1], now[2]).double()
    wanted = torch.cat(
        [
            attention(
                past[0][:, -count:],
                past[1],
                past[2],
                scale=arguments.scale,
                window=case.window,
                softcap=case.softcap,
                sinks=sinks,
            )
            for past, count in zip(history, counts, strict=True)
        ]
    )
    return float((got - wanted).norm() / wanted.norm())


def _backend(
    case: Case, kind: str, sequences: int, longest: int, device: str
) -> tuple[TritonBackend, KvLayout]:
    layout = KvLayout("", kind, 1, case.kv_heads, case.size, case.size)
    shape = AttentionShape(
        layout, kind, kind, case.heads // case.kv_heads, case.softcap is not None
    )
    backend = TritonBackend(
        shape,
        sequences * -(-longest // BLOCK),
        BLOCK,
        torch.device(device),
        max_model_len=longest,
        max_batch=sequences,
        exact=False,
    )
    return backend, layout


def _begin(backend: TritonBackend, chunks: tuple[Chunk, ...]) -> AttentionContext:
    context = backend.begin(StepPlan(0, chunks)).context
    assert context is not None
    return context


def _arguments(case: Case, sinks: torch.Tensor | None) -> LayerArguments:
    return LayerArguments(0, case.size**-0.5, case.window, case.softcap, sinks)


def _inputs(
    case: Case, layout: KvLayout, count: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value of `count` positions, heads first."""
    dtype = getattr(torch, layout.dtype)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    query, key, value = (torch.randn(n, count, case.size, device=device).to(dtype) for n in heads)
    return query, key, value
