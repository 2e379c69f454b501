"""transformers, imported without what an engine never uses of it.

Its modelling code imports torch's compiler (and with it Triton and ONNX) for a few marks on
functions that mean something inside a compiled model only, and torch's distributed tensors for
training on several machines. An engine compiles no model, and its ranks exchange plain tensors.
Both together took 0.9 of the 4 CPU seconds of imports at a start, and 110 MB.

So transformers regards torch as one that was built without distributed tensors, as some are, and
the compiler has a stand-in while modelling code is imported and while shapes are computed on the
meta device, which torch does in marked functions, too. What else is asked of the stand-in is
answered by the compiler itself, which is imported then: that costs time and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers.utils import import_utils

__all__ = [
    "Conv1D",
    "transformers",
    "transformers_logging",
    "without_compiler",
]

_COMPILER = "torch._dynamo"
_INDEXING = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MARKS = "disable", "allow_in_graph", "assume_constant_result", "mark_static_address"


class _StandIn(ModuleType):
    """Takes the place of a module until another attribute is read than those that it is given."""

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        # A package's path is read for modules in it that have no stand-in.
        if name.startswith("__") and not (name == "__path__" and self.__name__ == _COMPILER):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _mark(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Takes the place of a decorator, or of what makes one."""
    return (lambda marked: marked) if function is None else function


def _indexing() -> Any:
    """The compiler's context manager for masks that vmap makes; an engine makes none."""
    return importlib.import_module(_INDEXING).TransformGetItemToIndex()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it marks on functions do not import torch's compiler. Also a decorator."""
    if _COMPILER in sys.modules:
        yield  # It is there already, itself or its stand-in.
        return
    parent, attribute = vars(torch), _COMPILER.rpartition(".")[2]
    compiler = _StandIn(_COMPILER, **dict.fromkeys(_MARKS, _mark))
    stand_ins = {
        _COMPILER: compiler,
        _INDEXING: _StandIn(_INDEXING, TransformGetItemToIndex=_indexing),
    }
    sys.modules |= stand_ins
    parent[attribute] = compiler
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
        if parent.get(attribute) is compiler:
            del parent[attribute]


for _module in (transformers.utils, import_utils):
    vars(_module)["is_torch_distributed_available"] = lambda: False
with without_compiler():
    # The first two are what all modelling code imports.
    import transformers.masking_utils
    import transformers.modeling_layers
    from transformers.pytorch_utils import Conv1D
    from transformers.utils import logging as transformers_logging
