"""Fixtures that run a real Baton; one per module where the flags are the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import leaks
from tests.e2e.relay import Relay

MORE = ("deep", "chaos", "slow")
"""Marks of tests for which one worker of a kind may not do."""


@pytest.fixture(scope="session")
def relay(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """The bundled model, KV over NIXL; two of each engine worker, except where nothing but default
    tests share it."""
    needs_two = any(
        item.get_closest_marker(mark) for item in request.session.items for mark in MORE
    )
    two = ("--prefill", "2", "--decode", "2") if needs_two else ()
    running = Relay(tmp_path_factory.mktemp("relay"), *two)
    leaks.SHARED["relay"] = running
    yield running
    running.close()
