"""Fixtures that run a real Baton; one per module where the flags are the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import depth, leaks
from tests.e2e.relay import Relay


@pytest.fixture(scope="session")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """The bundled model, KV over NIXL. Deep tests have two of each engine worker."""
    two = ("--prefill", "2", "--decode", "2") if depth.DEEP else ()
    running = Relay(tmp_path_factory.mktemp("relay"), *two)
    leaks.SHARED["relay"] = running
    yield running
    running.close()
