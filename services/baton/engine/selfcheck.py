"""Runs a model both ways at load and compares: its own eager forward against our paged one.

Knows the forward pass as a function and plans; the one place that proves, for the very model on the
very machine, that attention is wired right and whether logits are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from baton.core.errors import InvalidArgument
from baton.core.kvcache.block_pool import Extents
from baton.core.request.request import SamplingParams
from baton.core.scheduler.plan import Chunk, SampleRow, StepPlan
from baton.engine.exact import NotExact
from baton.engine.loader import UnsupportedModel

Forward = Callable[[StepPlan], torch.Tensor]
"""Runs a plan and returns the sampled rows' logits [S, vocab]."""

_LENGTHS = (45, 22)
_CHUNK = 7
_GREEDY = SamplingParams(temperature=0.0)
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


def prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Two prompts of random tokens that differ in length and content."""
    numbers = random.Random(5)
    return [
        [numbers.randrange(vocab_size) for _ in range(min(length, max_model_len))]
        for length in _LENGTHS
    ]


def whole(forward: Forward, tables: Sequence[Extents], texts: list[list[int]]) -> torch.Tensor:
    """All prompts in one step: logits [prompts, vocab]."""
    return forward(StepPlan(0, tuple(_chunk(i, t, tables[i]) for i, t in enumerate(texts))))


def check_parity(
    forward: Forward,
    tables: Sequence[Extents],
    texts: list[list[int]],
    expected: list[torch.Tensor],
) -> None:
    """Raises UnsupportedModel when packed or chunked logits differ from eager ones.

    expected: per prompt the last position's logits [vocab], from the model's own attention. Raises
    InvalidArgument naming `dtype` when those are no numbers already: the model needs a wider range.
    """
    if any(bool(row.isnan().any()) for row in expected):
        dtype = str(expected[0].dtype).removeprefix("torch.")
        raise InvalidArgument(f"the model's logits are no numbers in {dtype}", field="dtype")
    _compare(whole(forward, tables, texts), expected, "packed prompts")
    _compare(_in_chunks(forward, tables, texts, _CHUNK), expected, "chunked prompts")


def check_decode(
    forward: Forward,
    tables: Sequence[Extents],
    texts: list[list[int]],
    expected: list[torch.Tensor],
) -> None:
    """Like check_parity, for prompts that are given token by token, as decode computes."""
    _compare(_in_chunks(forward, tables, texts, 1), expected, "tokens one by one")


def _compare(got: torch.Tensor, expected: list[torch.Tensor], how: str) -> None:
    for row, wanted in zip(got.float(), expected, strict=True):
        wanted = wanted.float()
        limit = _TOLERANCE[expected[0].dtype] * max(1.0, float(wanted.abs().max()))
        worst = float((row - wanted).abs().max())
        if not worst <= limit:
            raise UnsupportedModel(
                f"{how} give other logits than the model's own attention "
                f"(by {worst:.2g}): it cannot be served correctly"
            )


def check_exact(forward: Forward, tables: Sequence[Extents], texts: list[list[int]]) -> None:
    """Raises NotExact unless logits are bit-equal packed, alone, in chunks and token by token."""
    packed = whole(forward, tables, texts)
    alone = [forward(StepPlan(0, (_chunk(i, text, tables[i]),)))[0] for i, text in enumerate(texts)]
    others = [torch.stack(alone)]
    others += [_in_chunks(forward, tables, texts, size) for size in (_CHUNK, 1)]
    if not all(torch.equal(packed, other) for other in others):
        raise NotExact("logits vary with what else is in the batch")


def _in_chunks(
    forward: Forward, tables: Sequence[Extents], texts: list[list[int]], size: int
) -> torch.Tensor:
    """Logits of each prompt's last position, all prompts advancing by `size` a step."""
    last: dict[int, torch.Tensor] = {}
    for start in range(0, max(map(len, texts)), size):
        live = [i for i, text in enumerate(texts) if start < len(text)]
        chunks = tuple(_chunk(i, texts[i][start : start + size], tables[i], start) for i in live)
        for i, row in zip(live, forward(StepPlan(0, chunks)), strict=True):
            last[i] = row.clone()
    return torch.stack([last[i] for i in range(len(texts))])


def _chunk(sequence: int, tokens: list[int], extents: Extents, first_position: int = 0) -> Chunk:
    return Chunk(sequence, tokens, first_position, extents, (SampleRow(sequence, 0, 0, _GREEDY),))
