"""How deep tests look: a little by default, and all of it in `make test-deep` (BATON_DEEP=1).

A test that takes long is marked `deep`. One that runs an engine once for each architecture is
deep for all but FEW of them. A state machine runs in both, by default with a part of its examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

DEEP = os.environ.get("BATON_DEEP") == "1"
SHARE = 6
"""Of a state machine's examples, one in so many runs by default."""

FEW = {"llama", "gemma3", "qwen3_moe"}
"""Architectures of the default tests: dense, with windows, with experts."""

LONGEST = (
    "services/worker/test_degrees.py",
    "loadtest/bench/test_bench_runs.py",
    "engine/test_machines.py",
    "e2e/test_every_way.py",
    "engine/test_rank_processes.py",
    "engine/test_gpu_check.py",
    "deploy/test_compiled.py",
    "e2e/test_adapter_parity.py",
    "e2e/test_parity.py",
)
"""Files of the default and deep tests that take a minute and more. They begin first, so that no
process is left with one of them when the others have nothing more to do. Those that run several
ranks alternate with others: waiting ranks spin, and two such fleets take each other's cores."""

LAST = ("fuzz", "e2e")
"""Folders whose tests share a Baton until the session ends. They come last, so that it does not run
idle beside thousands of others. By default that is true of their longest, too."""


def examples(count: int) -> int:
    """Of a state machine, or of another property that many examples show."""
    return count if DEEP else max(5, count // SHARE)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts tests; those of a file keep their order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        if not item.path.is_relative_to(tests):
            return len(places)
        path = item.path.relative_to(tests)
        if not DEEP and path.parts[0] in LAST:
            return len(places) + 1
        return places.get(path.as_posix(), len(places) + (path.parts[0] in LAST))

    items.sort(key=place)


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of other architectures: of tests with a parameter `arch`."""
    for item in items:
        params = getattr(item, "callspec", None)
        if params is not None and params.params.get("arch", "llama") not in FEW:
            item.add_marker("deep")
