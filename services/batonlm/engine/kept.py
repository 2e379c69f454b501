"""Weights that stay in memory in the numbers of a quantised checkpoint.

A weight is cut by outputs into tiles. A product widens one tile after the other in the same few
megabytes, which stay in a cache, and multiplies it there: bits are those of a product with the
dequantised weight, cut likewise. Where torch has a product that reads the codes themselves, and the
model computes in its type, that one is taken instead, see `Chooser`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from batonlm.engine.checkpoint import Numbers
from batonlm.engine.exact import Product
from batonlm.engine.quantized import bind_codes4, bind_codes8, takes_codes4

# By its overload, because exact mode watches the functions of torch that modelling code calls.
_mm = torch.ops.aten.mm.default

TILE_NUMBERS = 1 << 20
"""Numbers of a tile that are wide at once. Fewer would be more calls for as many numbers."""
_MULTIPLE = 16
"""Outputs of a tile, but for the last one's, are a multiple of so many."""

# Of e4m3 the bits of sign, exponent and mantissa, moved to where bfloat16 has them, are the number
# divided by 2**120, with and without a leading one.
_E4M3_SHIFT = 4
_E4M3_MASK = -(1 << 15) | 0x7F0
_E4M3_SCALE = 2.0**120
_E4M3_NAN = 0x7F

# The same of e2m1, in the upper half of a byte, and 2**126.
_E2M1_SHIFT = 2
_E2M1_MASK = -(1 << 15) | 0x1C0
_E2M1_SCALE = 2.0**126

_LARGEST_SCALES = {"fp8": 128, "fp4": 4}
"""Scales as large would be more than float32 has, times what is in them."""


class NotKept(Exception):
    """A quantised weight has to be dequantised. Its text says why."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Some outputs of a weight, inputs first: codes of the same input lie side by side."""

    codes: torch.Tensor
    """uint8 [inputs * outputs / 2] of 4 bits and of e2m1, the first half of the numbers in the
    lower bits; int8 [inputs, outputs] of 8 bits and of e4m3."""
    scales: torch.Tensor
    """[groups, 1, outputs or 1]."""
    zeros: torch.Tensor | None
    """Shaped as scales: uint8 of 4 bits, where None stands for 8; int8 of 8 bits; None of e4m3 and
    e2m1."""

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, *(() if self.zeros is None else (self.zeros,)))
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight [outputs, inputs] as a checkpoint has it: (code - zero) * scale."""

    kind: str
    """int4, int8, fp8 (e4m3) or fp4 (e2m1)."""
    dtype: torch.dtype
    """That products are computed in."""
    inputs: int
    widths: tuple[int, ...]
    """Outputs of each tile."""
    tiles: tuple[Tile, ...]
    order: torch.Tensor | None
    """int64 [inputs]: which input each row of the tiles belongs to; None: their own order."""

    @classmethod
    def of(cls, numbers: Numbers, dtype: torch.dtype) -> KeptWeight:
        """numbers: of one matrix. Raises NotKept."""
        if numbers.codes.dim() != 2:
            raise NotKept("it is of several matrices")
        kind = "fp8" if numbers.codes.dtype == torch.float8_e4m3fn else f"int{numbers.bits}"
        kind = "fp4" if numbers.is_e2m1 else kind
        outputs, inputs = numbers.codes.shape
        codes, order = numbers.codes, None
        groups = numbers.scales.shape[-1]
        if inputs % groups or numbers.group not in (0, inputs // groups):
            raise NotKept(f"{groups} groups do not divide {inputs} inputs")
        if numbers.order is not None:
            sizes = torch.bincount(numbers.order, minlength=groups)
            if bool((sizes != inputs // groups).any()):
                raise NotKept("its groups of inputs are of several sizes")
            order = numbers.order.argsort(stable=True)
            codes = codes[:, order]
        if kind == "fp8":
            codes = codes.view(torch.int8)
            if not codes.is_meta and bool(((codes & _E4M3_NAN) == _E4M3_NAN).any()):
                raise NotKept("some of its codes are no numbers")
        largest = None if codes.is_meta else _LARGEST_SCALES.get(kind)
        if largest is not None and not bool((numbers.scales.abs() < largest).all()):
            raise NotKept("some of its scales are large")
        width = max(_MULTIPLE, TILE_NUMBERS // inputs // _MULTIPLE * _MULTIPLE)
        pieces = torch.split(codes, width)
        if kind in ("int4", "fp4") and any(piece.numel() % 2 for piece in pieces):
            raise NotKept("an odd number of codes shares no bytes")
        by_output = numbers.scales.shape[0] == outputs
        tiles = []
        for start, piece in zip(range(0, outputs, width), pieces, strict=True):
            own = slice(start, start + len(piece)) if by_output else slice(None)
            zeros = None if numbers.zeros is None else numbers.zeros[own]
            tiles.append(_tile(kind, piece, numbers.scales[own], zeros))
        widths = tuple(map(len, pieces))
        return cls(kind, dtype, inputs, widths, tuple(tiles), order)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.widths), self.inputs

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // len(self.tiles[0].scales)

    @property
    def has_own_product(self) -> bool:
        """Whether torch multiplies by these codes, in the type that the model computes in."""
        if self.dtype != torch.bfloat16:
            return False
        if self.kind == "int4":
            return takes_codes4(self.shape[0], self.group)
        return self.is_by_output

    @property
    def num_bytes(self) -> int:
        """That are taken while a model runs."""
        outputs, inputs = self.shape
        order = 0 if self.order is None else self.order.nbytes
        if not self.has_own_product:
            return order + sum(tile.num_bytes for tile in self.tiles)
        if self.kind == "int8":
            return order + outputs * (inputs + 2)
        return order + outputs * (inputs // 2 + 2 * 2 * (inputs // self.group))

    @property
    def form(self) -> str:
        return f"{self.kind} as stored"

    def joins(self, other: KeptWeight) -> bool:
        """Whether outputs of both may be of one weight."""
        if (self.kind, self.dtype, self.inputs) != (other.kind, other.dtype, other.inputs):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @classmethod
    def joined(cls, parts: Sequence[KeptWeight]) -> KeptWeight:
        """One behind the other, all of which join the first. No number is copied."""
        tiles = tuple(tile for part in parts for tile in part.tiles)
        widths = tuple(width for part in parts for width in part.widths)
        return replace(parts[0], tiles=tiles, widths=widths)

    def sample(self) -> KeptWeight:
        """A part of the weight with a tile of each width and form of scales, by which all products
        of it are proven."""
        found = {
            (width, tile.scales.shape, tile.zeros is None): (width, tile)
            for width, tile in zip(self.widths, self.tiles, strict=True)
        }
        widths, tiles = zip(*found.values(), strict=True)
        return replace(self, widths=widths, tiles=tiles)

    def dense(self) -> torch.Tensor:
        """[outputs, inputs] of dtype."""
        # Copied, as the next tile is widened to where this one is.
        parts = [
            _widened(self.kind, tile, self.inputs).to(self.dtype, copy=True) for tile in self.tiles
        ]
        whole = torch.cat(parts, 1).t()
        return whole if self.order is None else whole[:, self.order.argsort()]

    def bind(self, bias: torch.Tensor | None) -> Product:
        """[..., inputs] -> [..., outputs], by torch's own product of the codes or tile by tile."""
        product = self._own() if self.has_own_product else self._by_tile
        return self._around(product, bias)

    def bind_rounding(self, bind: Callable[..., Product], bias: torch.Tensor | None) -> Product:
        """A product of the codes and scales themselves, which rounds rows. The weight
        `is_by_output`."""
        return self._around(bind(*self._codes8()), bias)

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Tile by tile: [..., inputs] -> [..., outputs]."""
        return self._around(self._by_tile, bias)(rows)

    @property
    def is_by_output(self) -> bool:
        """Whether these are codes of 8 bits with a scale for each output and nothing else."""
        return self.kind == "int8" and all(
            tile.zeros is None and tuple(tile.scales.shape) == (1, 1, width)
            for tile, width in zip(self.tiles, self.widths, strict=True)
        )

    def _around(self, product: Product, bias: torch.Tensor | None) -> Product:
        (outputs, inputs), order = self.shape, self.order

        def whole(rows: torch.Tensor) -> torch.Tensor:
            shape = *rows.shape[:-1], outputs
            flat = rows.reshape(-1, inputs)
            if not len(flat):
                return rows.new_empty(shape)
            output = product(flat if order is None else flat.index_select(1, order))
            return (output if bias is None else output + bias).view(shape)

        return whole

    def _by_tile(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, inputs], in the order of the tiles -> [n, outputs]."""
        pieces = []
        for tile in self.tiles:
            wide = _widened(self.kind, tile, self.inputs)
            if wide.dtype != rows.dtype:
                narrow = _scratch("narrow", wide.numel(), rows.dtype).view(wide.shape)
                wide = narrow.copy_(wide)
            pieces.append(_mm(rows, wide))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _own(self) -> Product:
        if self.kind == "int8":
            return bind_codes8(*self._codes8())
        codes, scales, zeros = [], [], []
        for tile, width in zip(self.tiles, self.widths, strict=True):
            raw = _codes4(tile).view(self.inputs, width)
            codes.append(raw.t().to(torch.int32))
            own = tile.scales[:, 0].float().expand(-1, width)
            scales.append(own)
            zeros.append(torch.full_like(own, 8) if tile.zeros is None else tile.zeros[:, 0])
        return bind_codes4(torch.cat(codes), torch.cat(scales, 1), torch.cat(zeros, 1))

    def _codes8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [outputs, inputs] and float32 [outputs]."""
        codes = torch.cat([tile.codes for tile in self.tiles], 1).t().contiguous()
        return codes, torch.cat([tile.scales.flatten() for tile in self.tiles]).float()


def _tile(kind: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Tile:
    """codes: [outputs, inputs]. scales: [outputs or 1, groups]."""
    wide = codes.t().contiguous()
    if kind == "fp8":
        wide_scales = scales.float() * _E4M3_SCALE
        return Tile(wide, wide_scales.t().contiguous().unsqueeze(1), None)
    by_group = scales.t().contiguous().unsqueeze(1)
    if kind == "fp4":
        # Powers of two, which bfloat16 has all of.
        by_group = (by_group * _E2M1_SCALE).to(torch.bfloat16)
    offsets = None if zeros is None else zeros.t().contiguous().unsqueeze(1)
    if kind == "int8":
        if wide.dtype == torch.uint8:
            # Both move by 128, so that their difference stays what it is.
            wide = (wide ^ 128).view(torch.int8)
            offsets = None if offsets is None else (offsets ^ 128).view(torch.int8)
        return Tile(wide, by_group, offsets)
    flat = wide.flatten()
    if flat.dtype == torch.int8:
        flat = (flat + 8).view(torch.uint8)
    half = len(flat) // 2
    return Tile(flat[:half] | (flat[half:] << 4), by_group, offsets)


def _codes4(tile: Tile) -> torch.Tensor:
    """uint8 [inputs * outputs], in scratch memory."""
    half = len(tile.codes)
    raw = _scratch("raw", 2 * half, torch.uint8)
    torch.bitwise_and(tile.codes, 15, out=raw[:half])
    torch.bitwise_right_shift(tile.codes, 4, out=raw[half:])
    return raw


def _widened(kind: str, tile: Tile, inputs: int) -> torch.Tensor:
    """float32 [inputs, outputs] in scratch memory, until the next call on this thread."""
    if kind == "fp4":
        raw = _codes4(tile)
        upper = raw.bitwise_left_shift_(4).view(torch.int8)
        bits = _scratch("bits", len(raw), torch.int16)
        bits.copy_(upper).bitwise_left_shift_(_E2M1_SHIFT).bitwise_and_(_E2M1_MASK)
        wide = _scratch("wide", len(raw), torch.float32).view(inputs, -1)
        wide.copy_(bits.view(torch.bfloat16).view(wide.shape))
    elif kind == "int4":
        raw = _codes4(tile)
        by_group = raw.view(len(tile.scales), -1, len(raw) // inputs)
        # The difference wraps, and is right when it is read with a sign.
        by_group.sub_(8 if tile.zeros is None else tile.zeros)
        wide = _scratch("wide", len(raw), torch.float32).view(inputs, -1)
        wide.copy_(raw.view(torch.int8).view(wide.shape))
    else:
        codes = tile.codes
        wide = _scratch("wide", codes.numel(), torch.float32).view(codes.shape)
        if kind == "fp8":
            bits = _scratch("bits", codes.numel(), torch.int16).view(codes.shape)
            bits.copy_(codes).bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
            wide.copy_(bits.view(torch.bfloat16))
        else:
            wide.copy_(codes)
            if tile.zeros is not None:
                wide.view(len(tile.zeros), -1, wide.shape[1]).sub_(tile.zeros)
    wide.view(len(tile.scales), -1, wide.shape[1]).mul_(tile.scales)
    return wide


class _Scratch(threading.local):
    """A thread's memory for tiles, the largest that each use of it has needed."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_held = _Scratch()


def _scratch(use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    found = _held.held.get((use, dtype))
    if found is None or len(found) < count:
        # Also written outside of inference mode, which a tensor made within it does not allow.
        with torch.inference_mode(False):
            found = _held.held[use, dtype] = torch.empty(count, dtype=dtype)
    return found[:count]


class KeptLinear(nn.Module):
    """Does what nn.Linear does, over a weight that is kept. `linear.swap` replaces it, too.

    `weight` is a shape without memory, because some models look at its dtype.
    """

    bias: nn.Parameter | None

    def __init__(self, kept: KeptWeight, bias: nn.Parameter | None):
        super().__init__()
        self.kept = kept
        self.out_features, self.in_features = kept.shape
        self.weight = torch.empty(kept.shape, dtype=kept.dtype, device="meta")
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.kept.product(x, self.bias)

    @classmethod
    def joined(cls, parts: Sequence[KeptLinear]) -> KeptLinear:
        """One layer for several with the same inputs: their outputs one behind the other."""
        biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        return cls(KeptWeight.joined([part.kept for part in parts]), bias)


class KeptStack:
    """The matrices of all experts of a module, in the place of its parameter. Where the module's
    own code takes one out, it is dequantised; `linear.swap` binds them as they are."""

    def __init__(self, matrices: Sequence[KeptWeight], *, transposed: bool):
        """transposed: whether the module has inputs before outputs."""
        self.matrices = tuple(matrices)
        self.transposed = transposed
        rows, columns = matrices[0].shape[::-1] if transposed else matrices[0].shape
        self.shape: tuple[int, ...] = (len(matrices), rows, columns)

    @classmethod
    def of(cls, numbers: Numbers, dtype: torch.dtype) -> KeptStack:
        """numbers: of several matrices. Raises NotKept."""
        kept = [KeptWeight.of(one, dtype) for one in numbers.matrices()]
        return cls(kept, transposed=numbers.transposed)

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self.matrices)

    def __getitem__(self, index: torch.Tensor | int) -> torch.Tensor:
        if isinstance(index, torch.Tensor) and index.is_meta:
            return index.new_empty((*index.shape, *self.shape[1:]), dtype=self.matrices[0].dtype)
        dense = self.matrices[int(index)].dense()
        return dense.t() if self.transposed else dense


def stacks_of(module: nn.Module) -> dict[str, KeptStack]:
    """What a module of experts has instead of parameters, by name."""
    return {name: each for name, each in vars(module).items() if isinstance(each, KeptStack)}


def kept_in(network: nn.Module) -> list[KeptWeight]:
    """All weights of a network that stay as they are stored."""
    found = []
    for module in network.modules():
        if isinstance(module, KeptLinear):
            found.append(module.kept)
        found += [kept for stack in stacks_of(module).values() for kept in stack.matrices]
    return found


def rounds(network: nn.Module) -> bool:
    """Whether products of kept weights are not those of the dequantised ones: torch's own read
    scales in bfloat16."""
    return any(kept.has_own_product for kept in kept_in(network))
