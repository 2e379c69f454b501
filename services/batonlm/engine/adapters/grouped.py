"""Additions as Triton kernels: two launches a layer, for all rows and all adapters of a step.

An adapter that a step wants has a slot in a table on the device: for each layer, where its
matrices lie and of which ranks they are. The matrices stay tensors of their own, so that an adapter
takes the memory of its own ranks and layers, and any may make room for any. A step's rows are cut
into tiles of one adapter each, and rows without adapter are in none. The list of tiles is one small
array on the device; table and list stay where they are, and only what is in them changes. So steps
can be recorded once and replayed for other adapters: programs find the number of tiles on the
device.

A row's bits do not depend on its neighbours: a program computes it in the same order wherever it
stands in a tile. They depend on the tile's shape, which is one for all steps in exact mode.

The first product has few outputs and many inputs: these are split over programs, each of which
leaves a sum in float32, and the second product's programs add these up in order. Where the sums
would take too much memory one program adds up split by split, to the same bits. Between the
products numbers are rounded to the model's type, and so is what is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from batonlm.engine.adapters.files import MOST_RANK
from batonlm.engine.adapters.places import Part, Place
from batonlm.engine.attention.triton.jit import jit_of_any


@dataclass(frozen=True, slots=True)
class AdditionTile:
    """What a program computes."""

    rows: int
    """Of one adapter."""
    ranks: int
    """Of the outputs of the first product, and of the inputs of the second, at a time."""
    inner: int
    """Inputs of the first product that are read at a time."""
    columns: int
    """Outputs of the second product."""
    warps: int
    """Of Triton's compiler, as `stages`."""
    stages: int


# As for experts: 16 rows are the fewest that a matrix unit takes, 64 the fewest of Hopper's wide
# one, and exact float32 products run on none.
_FEW = AdditionTile(16, 32, 128, 128, 4, 3)
_MANY = AdditionTile(64, 32, 64, 128, 4, 3)
_FEW_WIDE = AdditionTile(16, 16, 32, 32, 4, 2)
_MANY_WIDE = AdditionTile(64, 16, 32, 32, 4, 2)

_SPLIT = 512
"""Inputs of the first product that are worth a program of their own."""
_MOST_SPLITS = 8
_SUM_BYTES = 64 << 20
"""Most memory of sums of which each split leaves one."""
_ALIGNED = 16
_UP_PROGRAMS = 8
"""Programs of the second product for the same outputs at most; each has several tiles where there
are more. A recorded step has as many programs as any adapters could need, and those without a tile
cost time, too."""
_ENTRY = 4
"""Numbers of the list for each tile: slot, first row, rows, and one that fills 16 bytes. In its
first entry the first number says how many tiles follow."""
_LAYER_FIELDS = 2
"""Of a slot for each layer: the address of the first matrix, of all parts, and its rank; then for
each part:"""
_PART_FIELDS = 3
"""The address of the second matrix, its rank, and the first of the first matrix's outputs that are
its inputs."""


def tiles_for(item_bytes: int) -> tuple[AdditionTile, AdditionTile]:
    """For few rows, and for many where exact mode does not want one for all."""
    return (_FEW, _MANY) if item_bytes < 4 else (_FEW_WIDE, _MANY_WIDE)


def split_of(inputs: int, inner: int) -> tuple[int, int]:
    """Inputs of a split, whole times `inner`, and how many splits there are."""
    size = -(-inputs // min(_MOST_SPLITS, -(-inputs // _SPLIT)))
    size = -(-size // inner) * inner
    return size, -(-inputs // size)


@dataclass(eq=False)
class GroupedAdapter:
    """An adapter on the device."""

    record: torch.Tensor
    """int64 [layers, fields], on the host: what its slot holds."""
    rank: int
    """The largest of any part, padded to what kernels are compiled for."""
    held: list[torch.Tensor]
    """The matrices that the record has addresses of."""
    slot: int = -1
    """The last that it had."""


@dataclass(frozen=True, slots=True)
class _Layer:
    places: list[Place]
    """In the order of their outputs."""
    outputs: torch.Tensor
    """int32 [places, 2], where the outputs of each begin and how many they are."""
    widest: int
    """The most of these."""
    divisor: int
    """Of all these numbers, as far as kernels make use of it."""


@dataclass(frozen=True, slots=True)
class _Step:
    tiles: torch.Tensor
    """int32 [more than the tiles, _ENTRY]."""
    most: int
    """Tiles that there may be."""
    rank: int
    """The largest that a part may have."""
    tile: AdditionTile
    held: Sequence[GroupedAdapter | None] = ()
    """So that what launches have addresses of is not freed by an unload before they are made."""


class GroupedAdditions:
    """Additions whose matrices a kernel finds by itself. See `Additions`."""

    def __init__(
        self,
        places: Iterable[Place],
        device: torch.device,
        dtype: torch.dtype,
        *,
        exact: bool,
        max_batch: int,
    ):
        """places: all, of every layer. dtype: of rows and matrices. max_batch: adapters of a step,
        and rows of a recorded one, at most."""
        self.most_adapters = max_batch
        self._device, self._exact, self._most_rows = device, exact, max_batch
        self._few, self._many = tiles_for(dtype.itemsize)
        by_layer: dict[int, list[Place]] = {}
        for place in sorted(places, key=lambda place: (place.layer, place.first)):
            by_layer.setdefault(place.layer, []).append(place)
        self._layers = [self._layer(by_layer[layer]) for layer in range(len(by_layer))]
        most_parts = max((len(layer.places) for layer in self._layers), default=0)
        fields = _LAYER_FIELDS + _PART_FIELDS * most_parts
        # What is a layer's begins at 16 bytes, as kernels are compiled for.
        shape = max_batch, len(self._layers), fields + fields % 2
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._tiles = torch.zeros(max_batch + 1, _ENTRY, dtype=torch.int32, device=device)
        """Of every step that is no larger than a recorded one."""
        self._owners: dict[int, weakref.ref[GroupedAdapter] | None] = dict.fromkeys(
            range(max_batch)
        )
        """Of each slot; the least recently used first."""
        self._step: _Step | None = None
        self._compile(dtype)

    def bind(self, layers: Sequence[Sequence[Part]]) -> GroupedAdapter:
        record = torch.zeros(self._table.shape[1:], dtype=torch.int64)
        held: list[torch.Tensor] = []
        rank = 0
        for own, layer, row in zip(layers, self._layers, record, strict=True):
            if not own:
                continue
            down = torch.cat([part.down for part in own])
            row[:_LAYER_FIELDS] = torch.tensor([down.data_ptr(), len(down)])
            held.append(down)
            before = 0
            for place, _, up in own:
                up = up.contiguous()
                first = _LAYER_FIELDS + _PART_FIELDS * layer.places.index(place)
                fields = [up.data_ptr(), up.shape[1], before]
                row[first : first + _PART_FIELDS] = torch.tensor(fields)
                held.append(up)
                before += up.shape[1]
                rank = max(rank, up.shape[1])
        if self._device.type == "cuda":
            record = record.pin_memory()
        return GroupedAdapter(record, -(-rank // _ALIGNED) * _ALIGNED, held)

    def begin(self, sizes: Sequence[int], adapters: Sequence[GroupedAdapter | None]) -> None:
        rows = sum(sizes)
        few = rows <= self._most_rows
        tile = self._few if few or self._exact else self._many
        entries: list[tuple[int, int, int, int]] = []
        first = rank = 0
        for size, adapter in zip(sizes, adapters, strict=True):
            if adapter is not None:
                slot = self._slot(adapter)
                rank = max(rank, adapter.rank)
                for row in range(0, size, tile.rows):
                    entries.append((slot, first + row, min(tile.rows, size - row), 0))
            first += size
        pinned = self._device.type == "cuda"
        listed = [(len(entries), 0, 0, 0), *entries]
        host = torch.tensor(listed, dtype=torch.int32, pin_memory=pinned)
        tiles = self._tiles if few else torch.empty_like(host, device=self._device)
        tiles[: len(host)].copy_(host, non_blocking=True)
        self._step = _Step(tiles, len(entries), rank, tile, adapters)

    def recording(self) -> Callable[[int], None]:
        # Programs would find tiles of the last step, whose rows a recording need not have.
        self._tiles.zero_()

        def begin(rows: int) -> None:
            self._step = _Step(self._tiles, rows, MOST_RANK, self._few)

        return begin

    def end(self) -> None:
        self._step = None

    def add(self, layer: int, rows: torch.Tensor, output: torch.Tensor) -> None:
        step, own = self._step, self._layers[layer]
        if step is None or not step.most:
            return
        _, splits = split_of(rows.shape[1], step.tile.inner)
        sums_bytes = 4 * splits * len(rows) * len(own.places) * step.rank
        self._launch(layer, rows, output, step, apart=sums_bytes <= _SUM_BYTES)

    def _launch(
        self, layer: int, rows: torch.Tensor, output: torch.Tensor, step: _Step, *, apart: bool
    ) -> None:
        """apart: whether each split has a program of its own."""
        own, tile = self._layers[layer], step.tile
        inputs, parts = rows.shape[1], len(own.places)
        split, splits = split_of(inputs, tile.inner)
        sums = splits if apart else 1
        width = parts * step.rank
        inner = torch.empty(sums, len(rows), width, dtype=torch.float32, device=rows.device)
        table = self._table[:, layer]
        common = {
            "SLOT": table.stride(0),
            "SUMS": sums,
            "ROWS": tile.rows,
            "RANKS": tile.ranks,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        _down[(step.most, sums)](
            rows.contiguous(),
            step.tiles,
            table,
            inner,
            len(rows),
            width,
            INPUTS=inputs,
            SPLIT=split,
            TOGETHER=splits // sums,
            INNER=tile.inner,
            **common,
        )
        columns = -(-own.widest // tile.columns)
        _up[(min(step.most, _UP_PROGRAMS), columns, parts)](
            inner,
            step.tiles,
            table,
            own.outputs,
            output,
            len(rows),
            width,
            OUTPUTS=output.shape[1],
            ALIGNED=own.divisor,
            COLUMNS=tile.columns,
            **common,
        )

    def _slot(self, adapter: GroupedAdapter) -> int:
        """An adapter's slot, which others of the same step do not take."""
        owner = self._owners.get(adapter.slot)
        if owner is None or owner() is not adapter:
            adapter.slot = next(iter(self._owners))
            # Its turn is behind the steps that read what was there.
            self._table[adapter.slot].copy_(adapter.record, non_blocking=True)
            owner = weakref.ref(adapter)
        self._owners.pop(adapter.slot)
        self._owners[adapter.slot] = owner
        return adapter.slot

    def _layer(self, places: list[Place]) -> _Layer:
        bounds = [(place.first, place.outputs) for place in places]
        aligned = all(number % _ALIGNED == 0 for pair in bounds for number in pair)
        outputs = torch.tensor(bounds, dtype=torch.int32, device=self._device)
        widest = max(place.outputs for place in places)
        return _Layer(places, outputs, widest, _ALIGNED if aligned else 1)

    def _compile(self, dtype: torch.dtype) -> None:
        """Has kernels compiled by steps without a tile, so that no step with adapters has to."""
        seen = set()
        for index, layer in enumerate(self._layers):
            last = layer.places[-1]
            inputs, outputs = last.inputs, last.first + last.outputs
            shape = inputs, outputs, layer.divisor
            if shape in seen:
                continue
            seen.add(shape)
            rows = torch.zeros(1, inputs, dtype=dtype, device=self._device)
            output = torch.zeros(1, outputs, dtype=dtype, device=self._device)
            for tile in {self._few, self._few if self._exact else self._many}:
                for apart in (True, False):
                    step = _Step(self._tiles, 1, MOST_RANK, tile)
                    self._launch(index, rows, output, step, apart=apart)


@jit_of_any("height")
def _down(
    rows: tl.tensor,
    tiles: tl.tensor,
    table: tl.tensor,
    inner: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    INPUTS: tl.constexpr,
    SLOT: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Program (t, s): the first product of tiles t, t + programs, ... over TOGETHER splits of the
    inputs, summed split by split, into inner [SUMS, height, width]. table: of one layer, SLOT
    numbers from slot to slot."""
    kind = rows.dtype.element_ty
    group = tl.program_id(1)
    for number in range(tl.program_id(0), tl.load(tiles), tl.num_programs(0)):
        entry = tiles + (number + 1) * 4
        own = table + tl.load(entry).to(tl.int64) * SLOT
        live = tl.arange(0, ROWS) < tl.load(entry + 2)
        row = (tl.load(entry + 1) + tl.arange(0, ROWS)).to(tl.int64)
        matrix = tl.multiple_of(tl.load(own).to(tl.pointer_type(kind)), 16)
        rank = tl.multiple_of(tl.load(own + 1).to(tl.int32), 8)
        for start in range(0, rank, RANKS):
            column = start + tl.arange(0, RANKS)
            there = column < rank
            whole = tl.zeros((ROWS, RANKS), tl.float32)
            for part in range(TOGETHER):
                total = tl.zeros((ROWS, RANKS), tl.float32)
                begin = (group * TOGETHER + part) * SPLIT
                for at in range(begin, begin + SPLIT, INNER):
                    element = at + tl.arange(0, INNER)
                    inside = element < INPUTS
                    spot = row[:, None] * INPUTS + element[None, :]
                    given = tl.load(rows + spot, mask=live[:, None] & inside[None, :], other=0.0)
                    spot = column[None, :] * INPUTS + element[:, None]
                    mask = inside[:, None] & there[None, :]
                    factor = tl.load(matrix + spot, mask=mask, other=0.0)
                    total = tl.dot(given, factor, total, input_precision="ieee")
                whole += total
            target = inner + (group * height + row[:, None]) * width + column[None, :]
            tl.store(target, whole, mask=live[:, None] & there[None, :])


@jit_of_any("height")
def _up(
    inner: tl.tensor,
    tiles: tl.tensor,
    table: tl.tensor,
    outputs: tl.tensor,
    output: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    OUTPUTS: tl.constexpr,
    SLOT: tl.constexpr,
    SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (t, c, p): adds the second product of tiles t, t + programs, ... to COLUMNS outputs
    of part p. ALIGNED: a divisor of where parts begin and of their sizes."""
    kind = output.dtype.element_ty
    part = tl.program_id(2)
    begin = tl.multiple_of(tl.load(outputs + 2 * part), ALIGNED)
    size = tl.multiple_of(tl.load(outputs + 2 * part + 1), ALIGNED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < size
    # Parts may be of several sizes, and have programs for the largest.
    count = tl.where(tl.program_id(1) * COLUMNS < size, tl.load(tiles), 0)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = tiles + (number + 1) * 4
        own = table + tl.load(entry).to(tl.int64) * SLOT + 2 + 3 * part
        rank = tl.multiple_of(tl.load(own + 1).to(tl.int32), 8)
        # An adapter may leave a part as it is.
        if rank > 0:
            live = tl.arange(0, ROWS) < tl.load(entry + 2)
            row = (tl.load(entry + 1) + tl.arange(0, ROWS)).to(tl.int64)
            matrix = tl.multiple_of(tl.load(own).to(tl.pointer_type(kind)), 16)
            before = tl.multiple_of(tl.load(own + 2), 8)
            source = inner + row[:, None] * width + before
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, rank, RANKS):
                element = start + tl.arange(0, RANKS)
                inside = element < rank
                given = tl.zeros((ROWS, RANKS), tl.float32)
                for group in range(SUMS):
                    spot = source + group * (height.to(tl.int64) * width) + element[None, :]
                    given += tl.load(spot, mask=live[:, None] & inside[None, :], other=0.0)
                spot = column[None, :] * rank + element[:, None]
                factor = tl.load(matrix + spot, mask=inside[:, None] & there[None, :], other=0.0)
                total = tl.dot(given.to(kind), factor, total, input_precision="ieee")
            target = output + row[:, None] * OUTPUTS + begin + column[None, :]
            mask = live[:, None] & there[None, :]
            added = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            added += total.to(kind).to(tl.float32)
            tl.store(target, added.to(kind), mask=mask)
