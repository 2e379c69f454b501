"""How deep tests look: a little by default, and all of it in `make test-deep` (BATON_DEEP=1).

A test that takes long is marked `deep`. One that runs an engine once for each architecture is
deep for all but FEW of them. A state machine runs in both, by default with a part of its examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

DEEP = os.environ.get("BATON_DEEP") == "1"
SHARE = 6
"""Of a state machine's examples, one in so many runs by default."""

FEW = {"llama", "gemma3", "qwen3_moe"}
"""Architectures of the default tests: dense, with windows, with experts."""


def examples(count: int) -> int:
    """Of a state machine."""
    return count if DEEP else max(5, count // SHARE)


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of other architectures: of tests with a parameter `arch`."""
    for item in items:
        params = getattr(item, "callspec", None)
        if params is not None and params.params.get("arch", "llama") not in FEW:
            item.add_marker("deep")
