"""Makes everything in a forward pass beside linear layers and attention independent of neighbours.

Two kinds of calls are caught, wherever modelling code makes them:

- products of rows with one matrix (routers and experts multiply by bare parameters): computed in
  proven numbers of rows, see `products`;
- functions that torch computes with vector instructions in the body of an array and with other,
  differently rounded code in its tail, once per thread: the array is cut so that there is no tail.

Catching costs two microseconds a call, whatever the call. So `confine` looks once where a model
makes such calls, and only the modules that do are watched from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from baton.engine.products import NotExact, Product, in_tiles, prove, random_rows, tiled

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

    hooks = [module.register_forward_pre_hook(enter) for module in network.modules()]
    hooks += [module.register_forward_hook(leave) for module in network.modules()]
    try:
        with _Spotter(lambda: found.add(running[-1])):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    mode = ExactMode()
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


class _Spotter(TorchFunctionMode):
    def __init__(self, spot: Callable[[], None]):
        super().__init__()
        self._spot = spot

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _varies(func, args):
            self._spot()
        return func(*args, **(kwargs or {}))


def _within(mode: TorchFunctionMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return watched


class ExactMode(TorchFunctionMode):
    """Catches calls while it is entered. Raises NotExact when a product cannot be proven."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[tuple[object, ...], frozenset[int]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not _varies(func, args):
            return func(*args, **(kwargs or {}))
        if func in _WITH_TAILS:
            return without_tails(lambda x: func(x, *args[1:], **(kwargs or {})), args[0])
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
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
        rows = input.reshape(-1, weight.shape[1])
        output = tiled(product, rows, self._proven(key, product, weight))
        return output.view(*input.shape[:-1], weight.shape[0])

    def _proven(
        self, key: tuple[object, ...], product: Product, weight: torch.Tensor
    ) -> frozenset[int]:
        if key not in self._sizes:
            rows = random_rows(weight.shape[1], weight.dtype, weight.device, _MOST)
            self._sizes[key] = prove(product, rows, in_tiles(product, rows))
        return self._sizes[key]


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
