"""What adapters add to a layer: the port, and its way for any device, a product for each adapter.

Each product is chosen and proven like any linear layer's, cut in proven numbers of rows as all are
in exact mode. So a row's bits do not depend on which adapters its neighbours have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from batonlm.engine.adapters.places import Part
from batonlm.engine.linear import Bound, Chooser


class Additions(Protocol):
    """A step's rows lie side by side by adapter. Between `begin` and `end`, every layer with a hook
    has `add` called once, with all rows of the step."""

    most_adapters: int
    """Of one step."""

    def bind(self, layers: Sequence[Sequence[Part]]) -> Any:
        """What `begin` takes for an adapter whose parts are these, by layer, in the order of their
        outputs. On any thread. Raises NotExact."""

    def begin(self, sizes: Sequence[int], adapters: Sequence[Any]) -> None:
        """sizes: rows of each segment, one behind the other. adapters: what was bound, of each
        segment; None adds nothing."""

    def recording(self) -> Callable[[int], None] | None:
        """What begins steps of so many rows that are recorded now, and later replayed within steps
        that `begin` begins, for their adapters. None where nothing can be recorded."""

    def end(self) -> None: ...

    def add(self, layer: int, rows: torch.Tensor, output: torch.Tensor) -> None:
        """rows: [T', inputs], the step's rows and what is padding behind them. output: [T',
        outputs], which is added to."""


class Up(NamedTuple):
    """Makes what is added to some outputs of a layer."""

    first: int
    outputs: int
    product: Bound


class Addition(NamedTuple):
    """What an adapter adds to a layer, of which it may adapt several parts."""

    down: Bound
    """Of all parts, one behind the other: they have the same inputs."""
    ranks: list[int]
    """Of each part."""
    ups: tuple[Up, ...]


class SlicedAdditions:
    """Additions by slices: one product after the other reads a segment's rows and adds to them, and
    nothing is gathered or scattered."""

    most_adapters = sys.maxsize

    def __init__(self, *, exact: bool, max_batch: int, alone: bool):
        """alone: whether each step has one chunk, of which layers may be given a part."""
        self._chooser = Chooser(exact=exact, max_batch=max_batch)
        self._alone = alone
        self._sizes: Sequence[int] = ()
        self._adapters: Sequence[tuple[Addition | None, ...] | None] = ()

    def bind(self, layers: Sequence[Sequence[Part]]) -> tuple[Addition | None, ...]:
        """Finds the forms of new shapes, so that no step has to."""
        return tuple(self._addition(own) if own else None for own in layers)

    def _addition(self, parts: Sequence[Part]) -> Addition:
        bind = self._chooser.bind
        ups = (Up(place.first, place.outputs, bind(up, None)) for place, _, up in parts)
        down = torch.cat([part.down for part in parts])
        return Addition(bind(down, None), [len(part.down) for part in parts], tuple(ups))

    def begin(
        self, sizes: Sequence[int], adapters: Sequence[tuple[Addition | None, ...] | None]
    ) -> None:
        self._sizes, self._adapters = sizes, adapters

    def recording(self) -> None:
        return None

    def end(self) -> None:
        # An adapter that makes room is held by nobody.
        self._adapters = ()

    def add(self, layer: int, rows: torch.Tensor, output: torch.Tensor) -> None:
        sizes = self._sizes
        if self._alone:
            sizes = [len(rows)]
        # What is behind the step's rows is padding.
        sizes = [*sizes, len(rows) - sum(sizes)]
        whole = torch.split(output, sizes)
        for adapter, x, y in zip(self._adapters, torch.split(rows, sizes), whole, strict=False):
            addition = None if adapter is None else adapter[layer]
            if addition is None:
                continue
            inner = addition.down(x)
            ups = addition.ups
            # In the form in which products were proven.
            each = [part.contiguous() for part in torch.split(inner, addition.ranks, 1)]
            for (first, outputs, up), part in zip(ups, each, strict=True):
                y.narrow(1, first, outputs).add_(up(part))
