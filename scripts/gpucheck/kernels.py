"""Our Triton attention against float64 arithmetic on the same GPU, and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.request.model import KvLayout
from baton.core.scheduler.plan import Chunk, StepPlan
from baton.engine.attention.interface import AttentionContext, LayerArguments
from baton.engine.attention.triton.backend import TritonBackend
from baton.engine.loader import AttentionShape
from baton_loadtest.report import Result, compared
from gpucheck.definition import attention
from gpucheck.timing import seconds

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
# Of each sequence, how many positions have KV and how many are computed now.
PARTS = ((0, 40), (515, 1), (300, 70), (16, 1), (0, 1), (1023, 1))
# Relative errors of a sound kernel, see the bounds of bfloat16's and float32's own rounding.
_LIMITS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}


def correctness(kind: str, device: str = "cuda") -> list[Result]:
    """Relative errors of a step that mixes chunks and single tokens, over fragmented blocks."""
    found = []
    for case in CASES:
        error = _error(case, kind, device)
        limit = _LIMITS[kind]
        result = Result(
            f"attention error, {kind}, {case.name}",
            error,
            "of norm",
            goal=limit,
            met=error <= limit,
        )
        found.append(result)
    return found


def decode_traffic(bandwidth: float, batch: int, context: int) -> Result:
    """One layer's decode attention alone, as a share of the memory's bandwidth."""
    case = CASES[0]
    backend, layout = _backend(case, "bfloat16", batch, context, "cuda")
    blocks = -(-context // BLOCK)
    chunks = tuple(Chunk(i, [0], context - 1, ((i * blocks, blocks),)) for i in range(batch))
    backend.memory.storage.normal_()
    step = _begin(backend, chunks)
    query, key, value = _inputs(case, layout, batch, "cuda")
    taken = seconds(lambda: step(_arguments(case, None), query, key, value))
    moved = 2 * batch * context * case.kv_heads * 2 * case.size
    return compared(
        f"attention alone, batch {batch}, {context} positions", moved / taken, "B/s", bandwidth
    )


def _error(case: Case, kind: str, device: str) -> float:
    torch.manual_seed(5)
    blocks = -(-max(map(sum, PARTS)) // BLOCK)
    backend, layout = _backend(case, kind, len(PARTS), blocks * BLOCK, device)
    sinks = torch.randn(case.heads, device=device) if case.sinks else None
    arguments = _arguments(case, sinks)
    chunks, history = [], []
    for i, (before, count) in enumerate(PARTS):
        # Blocks of all sequences are interleaved, in falling order.
        table = tuple((j * len(PARTS) + i, 1) for j in reversed(range(blocks)))
        chunks.append(Chunk(i, [0] * count, before, table))
        past = _inputs(case, layout, before + count, device)
        history.append(past)
        if before:
            step = _begin(backend, (Chunk(i, [0] * before, 0, table),))
            step(arguments, *(t[:, :before] for t in past))
    counts = [count for _, count in PARTS]
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
    shape = AttentionShape(layout, kind, case.heads // case.kv_heads, case.softcap is not None)
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
