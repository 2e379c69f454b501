"""How kernels, and functions for use within them, are declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, launched as `kernel[grid](*arguments)`, or a function for use within kernels.

    Annotations of its parameters may name nothing outside `triton.language`: the compiler reads
    them too.
    """
    return triton.jit(function)


def jit_of_any(*parameters: str) -> Callable[[Callable[..., Any]], Any]:
    """As `jit`, but one compiled kernel serves all values of these parameters."""
    wrap: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=parameters)
    return wrap
