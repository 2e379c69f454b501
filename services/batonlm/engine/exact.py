"""Makes a row's bits independent of the rows beside it, in products and everything but attention.

A BLAS picks its algorithm by the number of rows, and another algorithm sums in another order. So a
product is only ever computed with numbers of rows that were *proven* at load, on this machine and
for this shape, to give bit-equal rows; anything else is cut and padded to those. On the CPUs
measured most sizes pass, so that padding is small; where none passes, exactness is given up openly.

Linear layers do this by themselves, see `linear`. Beside them two kinds of calls are caught,
wherever modelling code makes them:

- products of rows with one matrix (routers and experts multiply by bare parameters): computed in
  proven numbers of rows;
- functions that torch computes with vector instructions in the body of an array and with other,
  differently rounded code in its tail, once per thread: the array is cut so that there is no tail.

Catching costs two microseconds a call, whatever the call. So `confine` looks once where a model
makes such calls, and only the modules that do are watched from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., inputs] -> [..., outputs] with weights bound."""

BASE = 16
MOST = 512
"""The most rows that are computed at once in exact mode."""

_SIZES = (
    *range(1, 8),
    *range(8, 32, 4),
    *range(32, 64, 8),
    *range(64, 128, 16),
    *range(128, MOST + 1, 32),
)
# What a call costs beside its rows, in rows: reading the weights. Fits float32 on the CPUs measured
# to a factor of two, and only decides between padding and cutting.
_CALL = 16
_OUTPUTS_IN_HALF = 1 << 16


class NotExact(Exception):
    """A product's rows depend on their neighbours whatever we do. Its text names the product."""


def random_rows(
    inputs: int, dtype: torch.dtype, device: torch.device, most: int = MOST
) -> torch.Tensor:
    """The same [most + 16, inputs] random rows every time."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    return torch.randn(most + BASE, inputs, generator=generator).to(dtype).to(device)


def in_tiles(product: Product, rows: torch.Tensor) -> torch.Tensor:
    """The bits that all other row counts are held against: rows in tiles of 16."""
    return torch.cat([product(rows[s : s + BASE]) for s in range(0, len(rows), BASE)])


def prove(product: Product, rows: torch.Tensor, expected: torch.Tensor) -> frozenset[int]:
    """The numbers of rows with which a product gives the expected bits, 16 always among them.

    rows: of `random_rows`; two summation orders agree on all outputs that are looked at by chance
    never. expected: [rows, outputs]. Raises NotExact when even tiles of 16 differ, or depend on
    where in the tile a row stands.
    """
    largest = len(rows) - BASE
    proven = set()
    for size in _SIZES:
        if size > largest:
            break
        starts = _starts(size, largest, expected.shape[1], expected.dtype)
        if all(torch.equal(product(rows[s : s + size]), expected[s : s + size]) for s in starts):
            proven.add(size)
    if BASE not in proven:
        raise NotExact(f"rows of a product with {rows.shape[1]} inputs depend on their place")
    return frozenset(proven)


def _starts(size: int, largest: int, outputs: int, dtype: torch.dtype) -> list[int]:
    """Where to cut `size` rows out of `largest` + 16, the first time across tiles of 16.

    Rounding to half precision hides a different order of summing in all but a few of ten thousand
    outputs, so there as many are looked at as it takes; in float32 it shows nearly everywhere.
    """
    wanted = _OUTPUTS_IN_HALF if dtype.itemsize < 4 else 3 * outputs
    count = -(-wanted // (size * outputs))
    span = largest + BASE - size
    return sorted({(BASE // 2 - 3 + i * span // count) % span for i in range(count)})


def tiled(product: Product, rows: torch.Tensor, sizes: frozenset[int]) -> torch.Tensor:
    """The product of [n, inputs] rows, computed in proven sizes only."""
    count = rows.shape[0]
    pieces = []
    start = 0
    for size in cuts(count, sizes):
        piece = rows[start : start + size]
        if len(piece) < size:
            piece = F.pad(piece, (0, 0, 0, size - len(piece)))
        pieces.append(product(piece))
        start += size
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count]


@lru_cache(maxsize=4096)
def cuts(count: int, sizes: frozenset[int]) -> tuple[int, ...]:
    """The sizes to compute `count` rows in, one behind the other; the last may be padded."""
    whole = max((size for size in sizes if size <= count), default=0)
    padded = min((size for size in sizes if size >= count), default=0)
    if not whole or whole == count:
        return (padded,)
    cut = (whole, *cuts(count - whole, sizes))
    if padded and padded + _CALL <= sum(cut) + _CALL * len(cut):
        return (padded,)
    return cut


_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
_WITH_TAILS = {
    torch.sigmoid,
    torch.Tensor.sigmoid,
    F.sigmoid,
    F.silu,
    F.gelu,
    F.softplus,
    F.mish,
    F.elu,
}
# The most rows of a caught product that are computed at once.
_MOST = 256
# Torch gives a thread at least this many elements, and shares out what is more than that evenly.
_GRAIN = 32768
# A multiple of two vectors of any element type on any CPU, which is what its loops unroll to.
_VECTORS = 128


def confine(network: nn.Module, run: Callable[[], object]) -> None:
    """Makes exact those modules of the network that call what varies during `run`.

    Runs twice, to find and to prove. Raises products.NotExact, with the network as it was, when a
    product cannot be proven.
    """
    running: list[nn.Module] = []
    found: set[nn.Module] = set()

    def enter(module: nn.Module, _inputs: object) -> None:
        running.append(module)

    def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
        running.pop()

    def spot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.add(running[-1])
        return func(*args, **kwargs)

    hooks = [module.register_forward_pre_hook(enter) for module in network.modules()]
    hooks += [module.register_forward_hook(leave) for module in network.modules()]
    try:
        with _Catcher(spot):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    mode = _Catcher(_Exactly())
    for module in found:
        module.forward = _within(mode, module.forward)
    try:
        run()
    except NotExact:
        for module in found:
            del module.forward
        raise


def _varies(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return func in _WITH_TAILS or func is F.linear or (func in _MATMULS and args[1].dim() == 2)


class _Catcher(TorchFunctionMode):
    """While it is entered, `call` makes the calls that vary: call(func, args, kwargs)."""

    def __init__(self, call: Callable[..., Any]):
        super().__init__()
        self._call = call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _varies(func, args):
            return self._call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _within(mode: TorchFunctionMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return watched


class _Exactly:
    """Makes calls that vary so that they do not. Raises NotExact when a product cannot be
    proven."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[object, ...], frozenset[int]] = {}

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in _WITH_TAILS:
            return without_tails(lambda x: func(x, *args[1:], **kwargs), args[0])
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return self._linear(args[0], args[1].t())

    def _linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def product(rows: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, weight, bias)

        key = (*weight.shape, weight.stride(), weight.dtype, bias is None)
        if key not in self._sizes:
            rows = random_rows(weight.shape[1], weight.dtype, weight.device, _MOST)
            self._sizes[key] = prove(product, rows, in_tiles(product, rows))
        output = tiled(product, input.reshape(-1, weight.shape[1]), self._sizes[key])
        return output.view(*input.shape[:-1], weight.shape[0])


def without_tails(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """function, which works element by element, over x of any shape in whole vectors only."""
    flat = x.reshape(-1)
    count = flat.numel()
    # A grain for each thread is shared out evenly; a grain or less is one thread's.
    size = _GRAIN * torch.get_num_threads()
    if count % size == 0 or (count % _VECTORS == 0 and (count <= _GRAIN or size == _GRAIN)):
        return function(flat).view(x.shape)
    if count <= _GRAIN:
        return function(F.pad(flat, (0, -count % _VECTORS)))[:count].view(x.shape)
    size = size if count > size else _GRAIN
    pieces = [without_tails(function, flat[s : s + size]) for s in range(0, count, size)]
    return torch.cat(pieces).view(x.shape)
