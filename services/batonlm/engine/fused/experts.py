"""Mixtures of experts as Triton kernels: which experts a token takes, and their products.

A token and one of its choices are a pair. Pairs are sorted by expert, and each program multiplies
pairs of one expert, some rows of a tile staying empty where an expert has fewer. Nothing here
depends on the host, so that all of it may be part of a CUDA graph: the grid has as many programs as
any choice of experts could need, and those without pairs end at once.

A pair's bits depend on no other: a program computes it in the same order wherever it stands in a
tile. They depend on the tile's shape, which a caller in exact mode therefore fixes.

Weights may be kept in e4m3, with a scale for each output of each expert. A program turns what it
has read to the type of its rows, which has all of e4m3's numbers, and scales the sum: rows are not
rounded, and half as many bytes are read as in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import nn

from batonlm.engine.attention.triton.jit import jit, jit_of_any
from batonlm.engine.attention.triton.shapes import padded
from batonlm.engine.quantized import fits, quantize_rows_fp8


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """What a program of `_multiply` computes."""

    rows: int
    """Pairs."""
    columns: int
    """Outputs."""
    inner: int
    """Inputs that are read at a time."""
    warps: int
    """Of Triton's compiler, as `stages`."""
    stages: int


# 16 rows are the fewest that a matrix unit takes, and 64 the fewest of Hopper's wide one. Exact
# float32 products run on no matrix unit, and want registers for both operands.
_FEW = ExpertTile(16, 64, 128, 4, 4)
_MANY = ExpertTile(64, 128, 64, 4, 3)
_FEW_WIDE = ExpertTile(16, 32, 32, 4, 2)
_MANY_WIDE = ExpertTile(64, 32, 32, 4, 2)
PAIRS = 1024
"""Pairs that a program of `_sort` looks at together."""
ELEMENTS = 1024
"""Elements of a row that a program computes where rows are only combined."""


def tile_for(pairs: int, experts: int, item_bytes: int, *, exact: bool) -> ExpertTile:
    """The tile for so many pairs, by how many an expert has on average; one for all when exact."""
    few, many = (_FEW, _MANY) if item_bytes < 4 else (_FEW_WIDE, _MANY_WIDE)
    return few if exact or pairs <= few.rows * experts else many


def route(
    logits: torch.Tensor, choices: int, *, normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each row and their shares: int32 and float32 [T, choices].

    logits: [T, experts]. normalised: shares add up to 1; otherwise they are of all experts' sum.
    Of equal experts the first is taken.
    """
    count, experts = logits.shape
    chosen = torch.empty(count, choices, dtype=torch.int32, device=logits.device)
    shares = torch.empty(count, choices, dtype=torch.float32, device=logits.device)
    _route[(count,)](
        logits,
        chosen,
        shares,
        EXPERTS=experts,
        EXPERTS_PADDED=padded(experts),
        CHOICES=choices,
        CHOICES_PADDED=padded(choices),
        NORMALISED=normalised,
        num_warps=1,
    )
    return chosen, shares


class GroupedExperts(nn.Module):
    """Experts over the weights of a module that `linear.are_known_experts`, as they lie there."""

    skips = True
    """A choice of a number behind the experts', which is another rank's, adds nothing."""

    def __init__(
        self, own: nn.Module, gate: Callable[[torch.Tensor], torch.Tensor], *, exact: bool
    ):
        """own: transformers' module. gate: [n, outputs of the first product] -> [n, inputs of the
        second one]."""
        super().__init__()
        self._gate, self._exact = gate, exact
        self._transposed = bool(own.is_transposed)
        self.into = own.get_parameter("gate_up_proj")
        self.out_of = own.get_parameter("down_proj")
        self.into_bias = own.get_parameter("gate_up_proj_bias") if own.has_bias else None
        self.out_of_bias = own.get_parameter("down_proj_bias") if own.has_bias else None
        self.into_scales: torch.Tensor | None = None
        """float32 [experts, outputs] of weights in e4m3; None of others."""
        self.out_of_scales: torch.Tensor | None = None
        """The same of the second product."""

    def round_weights(self) -> None:
        """Keeps weights in e4m3 from now on, where their sizes allow it."""
        self.into, self.into_scales = self._rounded(self.into)
        self.out_of, self.out_of_scales = self._rounded(self.out_of)

    def _rounded(self, weight: nn.Parameter) -> tuple[nn.Parameter, torch.Tensor | None]:
        """One expert after the other, so that wide numbers of one of them only are in memory."""
        by_output = weight.detach().transpose(1, 2) if self._transposed else weight.detach()
        if not fits(by_output[0], "fp8"):
            return weight, None
        held = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        target = held.transpose(1, 2) if self._transposed else held
        scales = torch.empty(by_output.shape[:2], dtype=torch.float32, device=weight.device)
        for expert, matrix in enumerate(by_output):
            numbers, by_row = quantize_rows_fp8(matrix)
            target[expert], scales[expert] = numbers, by_row[:, 0]
        return nn.Parameter(held, requires_grad=False), scales

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], chosen experts and their shares [T, choices] -> [T, hidden]."""
        count, choices = chosen.shape
        experts, pairs = len(self.into), count * choices
        order = chosen.new_empty(pairs)
        starts = chosen.new_empty(experts + 1)
        _sort[(experts + 1,)](chosen, order, starts, pairs, EXPERTS=experts, PAIRS=PAIRS)
        into = self.into, self.into_scales, self.into_bias
        out_of = self.out_of, self.out_of_scales, self.out_of_bias
        inner = self._multiply(hidden, choices, *into, order, starts)
        outer = self._multiply(self._gate(inner), 1, *out_of, order, starts)
        output = torch.empty_like(hidden)
        size = hidden.shape[1]
        _combine[(count, -(-size // ELEMENTS))](
            outer,
            chosen,
            shares,
            output,
            SIZE=size,
            CHOICES=choices,
            EXPERTS=experts,
            ELEMENTS=ELEMENTS,
        )
        return output

    def _multiply(
        self,
        rows: torch.Tensor,
        per_row: int,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        order: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """[pairs, outputs], of each pair its expert's product; rows of pairs that are skipped hold
        anything. per_row: pairs that share a row of `rows`."""
        pairs, experts = len(order), len(weight)
        outputs, inputs = weight.shape[1:] if not self._transposed else weight.shape[:0:-1]
        tile = tile_for(pairs, experts, rows.element_size(), exact=self._exact)
        output = rows.new_empty(pairs, outputs)
        # Each expert that has pairs may leave one tile unfilled.
        tiles = pairs // tile.rows + min(pairs, experts)
        _multiply[(tiles, -(-outputs // tile.columns))](
            rows,
            weight,
            rows if scales is None else scales,
            rows if bias is None else bias,
            order,
            starts,
            output,
            INPUTS=inputs,
            OUTPUTS=outputs,
            EXPERTS=experts,
            EXPERTS_PADDED=padded(experts),
            PER_ROW=per_row,
            TRANSPOSED=self._transposed,
            ROUNDED=scales is not None,
            BIASED=bias is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INNER=tile.inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return output


def clamped_gate(merged: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """GPT-OSS's gate: [n, 2 * size], a gate and then what it scales, in turns -> [n, size]."""
    count, size = merged.shape[0], merged.shape[1] // 2
    output = merged.new_empty(count, size)
    _clamped_gate[(count, -(-size // ELEMENTS))](
        merged, output, alpha, limit, SIZE=size, ELEMENTS=ELEMENTS
    )
    return output


@jit
def _route(
    logits: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_PADDED: tl.constexpr,
    NORMALISED: tl.constexpr,
) -> None:
    """Program r: row r."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PADDED)
    choice = tl.arange(0, CHOICES_PADDED)
    left = tl.load(logits + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    left = left.to(tl.float32)
    top = tl.max(left, 0)
    weights = tl.zeros((CHOICES_PADDED,), tl.float32)
    found = tl.zeros((CHOICES_PADDED,), tl.int32)
    total = tl.sum(tl.exp(left - top), 0)
    for turn in range(CHOICES):
        best = tl.max(left, 0)
        # A row of no numbers is equal to nothing: it takes the last expert, and has no share.
        taken = tl.min(tl.where(left == best, expert, EXPERTS - 1), 0)
        weights = tl.where(choice == turn, tl.exp(best - top), weights)
        found = tl.where(choice == turn, taken, found)
        left = tl.where(expert == taken, float("-inf"), left)
    if NORMALISED:
        total = tl.sum(weights, 0)
    tl.store(chosen + row * CHOICES + choice, found, mask=choice < CHOICES)
    tl.store(shares + row * CHOICES + choice, weights / total, mask=choice < CHOICES)


@jit_of_any("pairs")
def _sort(
    chosen: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Program e: writes where the pairs of expert e begin, and these pairs in rising order. That of
    the number behind the last expert writes where all end."""
    expert = tl.program_id(0)
    before = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        number = tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS)
        before += (number < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    if expert < EXPERTS:
        for start in range(0, pairs, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            own = tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS) == expert
            ahead = tl.cumsum(own.to(tl.int32), 0)
            tl.store(order + place + ahead - 1, pair, mask=own)
            place += tl.sum(own.to(tl.int32), 0)


@jit
def _multiply(
    rows: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    output: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    PER_ROW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Program (t, c): COLUMNS outputs of the pairs of tile t, tiles being counted through all
    experts. Weights are [experts, outputs, inputs], or [experts, inputs, outputs] if TRANSPOSED; if
    ROUNDED they are times scales [experts, outputs]."""
    number = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PADDED)
    first = tl.load(starts + expert, mask=expert < EXPERTS, other=0)
    last = tl.load(starts + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = (last - first + ROWS - 1) // ROWS
    own = tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0)
    if own < EXPERTS:
        earlier = tl.sum(tl.where(expert < own, tiles, 0), 0)
        place = tl.load(starts + own) + (number - earlier) * ROWS + tl.arange(0, ROWS)
        live = place < tl.load(starts + own + 1)
        pair = tl.load(order + place, mask=live, other=0)
        source = rows + ((pair // PER_ROW).to(tl.int64) * INPUTS)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < OUTPUTS
        matrix = weight + own.to(tl.int64) * (INPUTS * OUTPUTS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, INPUTS, INNER):
            element = start + tl.arange(0, INNER)
            inside = element < INPUTS
            part = tl.load(
                source + element[None, :], mask=live[:, None] & inside[None, :], other=0.0
            )
            if TRANSPOSED:
                spot = element[:, None] * OUTPUTS + column[None, :]
            else:
                spot = column[None, :] * INPUTS + element[:, None]
            factor = tl.load(matrix + spot, mask=inside[:, None] & there[None, :], other=0.0)
            total = tl.dot(part, factor.to(part.dtype), total, input_precision="ieee")
        kind = output.dtype.element_ty
        if ROUNDED:
            scale = tl.load(scales + own * OUTPUTS + column, mask=there, other=0.0)
            total = total * scale[None, :]
        if BIASED:
            offset = tl.load(bias + own * OUTPUTS + column, mask=there, other=0.0)
            total = total.to(kind).to(tl.float32) + offset.to(tl.float32)[None, :]
        target = output + (pair.to(tl.int64) * OUTPUTS)[:, None] + column[None, :]
        tl.store(target, total.to(kind), mask=live[:, None] & there[None, :])


@jit
def _clamped_gate(
    merged: tl.tensor,
    output: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Program (i, j): ELEMENTS elements of row i."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = element < SIZE
    spot = merged + (row * SIZE + element) * 2
    kind = merged.dtype.element_ty
    gate = tl.load(spot, mask=there, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.load(spot + 1, mask=there, other=0.0).to(tl.float32)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    opening = (gate * alpha).to(kind).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-opening))).to(kind).to(tl.float32)
    glu = (gate * opened).to(kind).to(tl.float32)
    raised = (up + 1.0).to(kind).to(tl.float32)
    tl.store(output + row * SIZE + element, (raised * glu).to(kind), mask=there)


@jit
def _combine(
    parts: tl.tensor,
    chosen: tl.tensor,
    shares: tl.tensor,
    output: tl.tensor,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Program (i, j): ELEMENTS elements of row i, the shares of what its experts made."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = element < SIZE
    total = tl.zeros((ELEMENTS,), tl.float32)
    for choice in range(CHOICES):
        pair = row * CHOICES + choice
        # What another rank computes was not written here.
        own = there & (tl.load(chosen + pair) < EXPERTS)
        part = tl.load(parts + pair * SIZE + element, mask=own, other=0.0).to(tl.float32)
        total += tl.where(own, part * tl.load(shares + pair).to(tl.float32), 0.0)
    tl.store(output + row * SIZE + element, total.to(output.dtype.element_ty), mask=there)
