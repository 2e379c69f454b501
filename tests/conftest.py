"""What holds for every test: how Triton's kernels run, and that workers end up holding nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import depth, leaks

# How long an example takes says nothing about what it tests.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

# Without a GPU, kernels run in Triton's interpreter. Triton decides when it is first imported, and
# modules of any test may do that on their way: so this comes before all of them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with workers that outlive it, nothing of it stays on them."""
    yield
    leaks.check_all(request.fixturenames)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    depth.mark(items)
    depth.longest_first(items)
