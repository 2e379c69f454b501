"""What holds for every test: how Triton's kernels run, and that workers end up holding nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks

# Without a GPU, kernels run in Triton's interpreter. Triton decides when it is first imported, and
# modules of any test may do that on their way: so this comes before all of them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Whatever a test does with workers that outlive it, nothing of it stays on them."""
    yield
    leaks.check_all()
