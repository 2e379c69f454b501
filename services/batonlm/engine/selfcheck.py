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
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.attention.interface import AttentionContext, LayerArguments
from batonlm.engine.attention.kernels import reference
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.exact import NotExact
from batonlm.engine.kv import scaled
from batonlm.engine.memory import CHECKED_POSITIONS

Forward = Callable[[StepPlan], torch.Tensor]
"""Runs a plan and returns the sampled rows' logits [S, vocab]."""

_CHUNK = 7
_STATE_CHUNKS = 2, 20
"""Positions: fewer than a convolution of 4 looks back at, and most of a prompt."""
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
    """Of each prompt all positions' logits [T, vocab], from the model's own attention; without
    elements on ranks that compute no logits, where nothing is compared."""
    rounding: float = 0.0
    """By how much more than otherwise logits may differ, see `with_scaled_kv`."""

    def parity(self) -> None:
        """Raises UnsupportedModel when packed or chunked logits differ from eager ones, and
        InvalidArgument naming `dtype` when these are no numbers already: the model needs a wider
        range."""
        self._check_numbers()
        # Ranks that compare nothing compute as often as those that find a difference.
        packed, chunked = self.packed(), self._in_chunks(_CHUNK)
        self._compare_last(packed, "packed prompts")
        self._compare(chunked, _CHUNK, "chunked prompts")

    def packed_parity(self) -> None:
        """The first half of `parity`: prompts in one piece."""
        self._check_numbers()
        self._compare_last(self.packed(), "packed prompts")

    def decode(self) -> None:
        """Like `parity`, for prompts that are given token by token, as decode computes."""
        self._compare(self._in_chunks(1), 1, "tokens one by one")

    def states(self, copy: Callable[[BlockCopy], None], block_size: int) -> None:
        """Like `parity`, for what layers with a state of the sequence may do wrong: in chunks of
        more sizes, and in a fork, which goes on in copies of blocks whose owner went on first."""
        for size in _STATE_CHUNKS:
            self._compare(self._in_chunks(size), size, f"chunks of {size} positions")
        text, expected, (here, there) = self.texts[0], self.expected[0], self.tables[:2]
        half = len(text) // 2
        if not half:
            return
        self.forward(StepPlan(0, (_chunk(0, text[:half], here),)))
        for source, target in zip(_blocks(here), _blocks(there), strict=True):
            copy(BlockCopy(source, target, block_size))
        others = _chunk(0, text[:half][::-1], here, half)
        rows = self.forward(StepPlan(0, (others, _chunk(1, text[half:], there, half))))
        _compare(rows[1:], [expected[-1] if expected.numel() else expected], "forks")

    def exact(self) -> None:
        """Raises NotExact unless logits are bit-equal packed, alone, in chunks and token by
        token."""
        packed = self.packed()
        chunks = [_chunk(i, text, self.tables[i]) for i, text in enumerate(self.texts)]
        others = [torch.stack([self.forward(StepPlan(0, (chunk,)))[0] for chunk in chunks])]
        others += [_last_of(self._in_chunks(size)) for size in (_CHUNK, 1)]
        if not all(torch.equal(packed, other) for other in others):
            raise NotExact("logits vary with what else is in the batch")

    def packed(self) -> torch.Tensor:
        """All prompts in one step: logits [prompts, vocab]."""
        chunks = (_chunk(i, text, self.tables[i]) for i, text in enumerate(self.texts))
        return self.forward(StepPlan(0, tuple(chunks)))

    def _in_chunks(self, size: int) -> list[list[torch.Tensor]]:
        """Of each prompt the logits [vocab] of its chunks' last positions, all prompts advancing by
        `size` a step."""
        texts = self.texts
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        for at in range(0, max(map(len, texts)), size):
            live = [i for i, text in enumerate(texts) if at < len(text)]
            chunks = tuple(_chunk(i, texts[i][at : at + size], self.tables[i], at) for i in live)
            for i, row in zip(live, self.forward(StepPlan(0, chunks)), strict=True):
                found[i].append(row.clone())
        return found

    def _compare(self, got: list[list[torch.Tensor]], size: int, how: str) -> None:
        """got: of each prompt the rows of its chunks' last positions, chunks being of this size."""
        for rows, expected in zip(got, self.expected, strict=True):
            if expected.numel():
                ends = [min((i + 1) * size, len(expected)) - 1 for i in range(len(rows))]
                _compare(torch.stack(rows), [expected[end] for end in ends], how, self.rounding)

    def _compare_last(self, got: torch.Tensor, how: str) -> None:
        _compare(
            got, [rows[-1] if rows.numel() else rows for rows in self.expected], how, self.rounding
        )

    def _check_numbers(self) -> None:
        if any(bool(rows.isnan().any()) for rows in self.expected):
            dtype = str(self.expected[0].dtype).removeprefix("torch.")
            raise InvalidArgument(f"the model's logits are no numbers in {dtype}", field="dtype")


def with_scaled_kv(
    run: Callable[[list[int], AttentionContext], torch.Tensor],
    texts: list[list[int]],
    expected: list[torch.Tensor],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], float]:
    """What to expect where KV is kept as codes of this dtype: the model's logits [T, vocab] of each
    prompt if its attention sees the numbers that codes and scales stand for, and by how much these
    may be missed.

    That is the most by which rounding to codes moves a logit: a number near the middle between two
    codes becomes either, by the last bit of what computed it, and in deep models one such number
    moves the next ones.

    run: all positions' logits of a prompt in one piece with a given attention. expected: those
    of the model's own. Raises UnsupportedModel where the attention that stands for it here differs
    from it over numbers that are kept whole.
    """
    for text, own in zip(texts, expected, strict=True):
        _compare(run(text, _reference(lambda numbers: numbers)), list(own), "whole prompts")

    def kept(numbers: torch.Tensor) -> torch.Tensor:
        return scaled.widened(*scaled.narrowed(numbers, dtype)).to(numbers.dtype)

    found = [run(text, _reference(kept)) for text in texts]
    moved = (row - own for row, own in zip(found, expected, strict=True) if own.numel())
    return found, max((float(by.float().abs().max()) for by in moved), default=0.0)


def _reference(kept: Callable[[torch.Tensor], torch.Tensor]) -> AttentionContext:
    """Attention of one whole prompt to keys and values as they come out of being kept."""

    def attend(
        arguments: LayerArguments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        per_head = len(query) // len(key)
        key, value = (kept(part).repeat_interleave(per_head, 0)[None] for part in (key, value))
        at = torch.arange(query.shape[1], device=query.device)
        back = at[:, None] - at
        unseen = (back < 0) | (back >= (arguments.window or len(at)))
        mask = torch.zeros_like(back, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
        found = reference(query[None], key, value, mask, arguments.scale, arguments.softcap)
        output, lse = found[0][0], found[1][0]
        if arguments.sinks is not None:
            share = torch.sigmoid(lse - arguments.sinks.float()[:, None])
            output = output * share.unsqueeze(-1).to(output.dtype)
        return output.transpose(0, 1)

    return attend


def _blocks(extents: Extents) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


def _last_of(found: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([rows[-1] for rows in found])


def _compare(
    got: torch.Tensor, expected: list[torch.Tensor], how: str, rounding: float = 0.0
) -> None:
    for row, wanted in zip(got.float(), expected, strict=True):
        if not wanted.numel():
            continue
        limit = _TOLERANCE[wanted.dtype] * max(1.0, float(wanted.float().abs().max()))
        worst = float((row - wanted.float()).abs().max())
        if not worst <= limit + rounding:
            raise UnsupportedModel(
                f"{how} give other logits than the model's own attention "
                f"(by {worst:.2g}): it cannot be served correctly"
            )


def _chunk(sequence: int, tokens: list[int], extents: Extents, first_position: int = 0) -> Chunk:
    return Chunk(sequence, tokens, first_position, extents, (SampleRow(sequence, 0, 0, _GREEDY),))
