"""The sampler on the device: how long it takes, and whether it draws what a CPU draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from baton_loadtest.report import Result, compared
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.sampler import LastTokens, SampledStep
from batonlm.engine.sampler_rows import TokenCounts
from gpucheck.check import Check
from gpucheck.speed import kernel_table
from gpucheck.timing import seconds

GOAL_MS = 0.2
"""Of one step's sampling at 64 rows of 128 Ki tokens."""

_GREEDY = SamplingParams(temperature=0.0)
WISHES = {
    "greedy": _GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "min-p": SamplingParams(temperature=1.1, min_p=0.02, seed=1),
    "penalties": SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=1,
    ),
    "bias": SamplingParams(logit_bias=((3, 4.0), (70, -100.0)), top_k=20, seed=1),
    "greedy with a penalty": replace(_GREEDY, repetition_penalty=1.5),
}
_HISTORY = 1024


def speed(check: Check) -> Iterator[Result]:
    """Device time from the first kernel of sampling to the last one, the uploads included."""
    rows, vocab = (64, 128256) if check.on_gpu else (4, 512)
    kind = torch.bfloat16 if check.on_gpu else torch.float32
    logits = torch.randn(rows, vocab, device=check.device).to(kind) * 3
    last, counts = LastTokens(logits.device), TokenCounts(logits.device)
    for name, params in WISHES.items():
        plan = _plan([params] * rows, 1, min(_HISTORY, vocab))

        def sample(plan: StepPlan = plan) -> SampledStep:
            return SampledStep(plan, logits, last, counts)

        taken = seconds(sample, check.device)
        title = f"sampling {rows} x {vocab}, {name}"
        yield check.duration(title, taken * 1e3, "ms", GOAL_MS)
        kernels, *_ = kernel_table(check, title, sample, 1, 1)
        yield kernels


def bits(check: Check) -> Iterator[Result]:
    """Tokens of the device that are the CPU's, over wishes, number types and vocabularies."""
    rounds, rows = (8, 64) if check.on_gpu else (1, 8)
    for kind in ("float32", "bfloat16", "float16"):
        for vocab in (128256, 151936, 1000) if check.on_gpu else (1000,):
            alike = total = 0
            for number in range(rounds):
                generator = torch.Generator().manual_seed(number)
                logits = torch.randn(rows, vocab, generator=generator) * 3
                # Ties, and a row that cannot be sampled.
                logits[:, 5:9] = logits[:, 4:5]
                logits[1, 0] = torch.nan
                logits = logits.to(getattr(torch, kind))
                wishes = [replace(w, seed=i) for i, w in enumerate(_wishes(rows))]
                plan = _plan(wishes, number, min(100, vocab))
                got = _tokens(plan, logits.to(check.device))
                wanted = _tokens(plan, logits)
                total += rows
                alike += sum(wanted.get(i) == got.get(i) for i in range(rows))
            yield compared(f"sampler's bits, {kind}, {vocab}", alike, "tokens", total, 1.0)


def _wishes(rows: int) -> list[SamplingParams]:
    kinds = list(WISHES.values())
    return [kinds[i % len(kinds)] for i in range(rows)]


def _tokens(plan: StepPlan, logits: torch.Tensor) -> dict[int, int]:
    """Of each sequence; those that failed have none."""
    device = logits.device
    result = SampledStep(plan, logits, LastTokens(device), TokenCounts(device)).result()
    return {token.sequence_id: token.token_id for token in result.tokens}


def _plan(wishes: list[SamplingParams], step: int, history: int) -> StepPlan:
    """One sequence for each wish, whose text so far is `history` tokens long where it matters."""
    chunks = []
    for i, params in enumerate(wishes):
        text = tuple((7 * i + 3 * j) % history for j in range(history))
        seen = text if params.needs_history else ()
        row = SampleRow(i, 0, step, params, (), seen, len(seen) // 2)
        chunks.append(Chunk(i, (0,), 0, ((i, 1),), (row,)))
    return StepPlan(step, tuple(chunks))
