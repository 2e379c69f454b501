"""Fixtures that run a real Baton; one per module where the flags are the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import leaks
from tests.e2e.relay import Relay


@pytest.fixture(scope="session")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """The bundled model, KV over NIXL, two of each engine worker."""
    running = Relay(tmp_path_factory.mktemp("relay"), "--prefill", "2", "--decode", "2")
    leaks.SHARED["relay"] = running
    yield running
    running.close()
