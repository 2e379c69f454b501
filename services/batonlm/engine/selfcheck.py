"""Runs a model both ways at load and compares: its own eager forward against our paged one.

It is the one place that proves, for the very model on the very machine, that attention is wired
right and whether logits are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.exact import NotExact
from batonlm.engine.memory import CHECKED_POSITIONS

Forward = Callable[[StepPlan], torch.Tensor]
"""Runs a plan and returns the sampled rows' logits [S, vocab]."""

_CHUNK = 7
_GREEDY = SamplingParams(temperature=0.0)
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


def prompts(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Two prompts of random tokens that differ in length and content."""
    numbers = random.Random(5)
    return [
        [numbers.randrange(vocab_size) for _ in range(min(length, max_model_len))]
        for length in CHECKED_POSITIONS
    ]


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Compares what `forward` makes of prompts, given in one piece and in several."""

    forward: Forward
    tables: Sequence[Extents]
    """The blocks of each prompt."""
    texts: list[list[int]]
    expected: list[torch.Tensor]
    """Of each prompt the last position's logits [vocab], from the model's own attention; without
    elements on ranks that compute no logits, where nothing is compared."""

    def parity(self) -> None:
        """Raises UnsupportedModel when packed or chunked logits differ from eager ones, and
        InvalidArgument naming `dtype` when these are no numbers already: the model needs a wider
        range."""
        self._check_numbers()
        # Ranks that compare nothing compute as often as those that find a difference.
        packed, chunked = self.packed(), self._in_chunks(_CHUNK)
        self._compare(packed, "packed prompts")
        self._compare(chunked, "chunked prompts")

    def packed_parity(self) -> None:
        """The first half of `parity`: prompts in one piece."""
        self._check_numbers()
        self._compare(self.packed(), "packed prompts")

    def decode(self) -> None:
        """Like `parity`, for prompts that are given token by token, as decode computes."""
        self._compare(self._in_chunks(1), "tokens one by one")

    def exact(self) -> None:
        """Raises NotExact unless logits are bit-equal packed, alone, in chunks and token by
        token."""
        packed = self.packed()
        chunks = [_chunk(i, text, self.tables[i]) for i, text in enumerate(self.texts)]
        others = [torch.stack([self.forward(StepPlan(0, (chunk,)))[0] for chunk in chunks])]
        others += [self._in_chunks(size) for size in (_CHUNK, 1)]
        if not all(torch.equal(packed, other) for other in others):
            raise NotExact("logits vary with what else is in the batch")

    def packed(self) -> torch.Tensor:
        """All prompts in one step: logits [prompts, vocab]."""
        chunks = (_chunk(i, text, self.tables[i]) for i, text in enumerate(self.texts))
        return self.forward(StepPlan(0, tuple(chunks)))

    def _in_chunks(self, size: int) -> torch.Tensor:
        """Logits of each prompt's last position, all prompts advancing by `size` a step."""
        texts = self.texts
        last: dict[int, torch.Tensor] = {}
        for at in range(0, max(map(len, texts)), size):
            live = [i for i, text in enumerate(texts) if at < len(text)]
            chunks = tuple(_chunk(i, texts[i][at : at + size], self.tables[i], at) for i in live)
            for i, row in zip(live, self.forward(StepPlan(0, chunks)), strict=True):
                last[i] = row.clone()
        return torch.stack([last[i] for i in range(len(texts))])

    def _check_numbers(self) -> None:
        if any(bool(row.isnan().any()) for row in self.expected):
            dtype = str(self.expected[0].dtype).removeprefix("torch.")
            raise InvalidArgument(f"the model's logits are no numbers in {dtype}", field="dtype")

    def _compare(self, got: torch.Tensor, how: str) -> None:
        for row, wanted in zip(got.float(), self.expected, strict=True):
            if not wanted.numel():
                continue
            limit = _TOLERANCE[wanted.dtype] * max(1.0, float(wanted.float().abs().max()))
            worst = float((row - wanted.float()).abs().max())
            if not worst <= limit:
                raise UnsupportedModel(
                    f"{how} give other logits than the model's own attention "
                    f"(by {worst:.2g}): it cannot be served correctly"
                )


def _chunk(sequence: int, tokens: list[int], extents: Extents, first_position: int = 0) -> Chunk:
    return Chunk(sequence, tokens, first_position, extents, (SampleRow(sequence, 0, 0, _GREEDY),))
