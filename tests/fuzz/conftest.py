"""The running Batons that are fuzzed: with a made-up engine by default, else with the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import leaks
from tests.e2e.relay import Relay
from tests.encode.models import saved
from tests.fuzz.target import Target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    yield from _running("target", tmp_path_factory, "--runner", "fake", "--vllm-engine")


@pytest.fixture(scope="session")
def real_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    yield from _running("real_target", tmp_path_factory, "--vllm-engine")


def _running(fixture: str, factory: pytest.TempPathFactory, *flags: str) -> Iterator[Target]:
    # Templates of clients too, so that more of what they say is shown, and read.
    allowed = {"BATON_ALLOW_CLIENT_TEMPLATES": "true"}
    model = saved("bert-cls", factory.mktemp("vectors") / "bert-cls")
    flags = (*flags, "--embed-model", str(model))
    relay = Relay(factory.mktemp("fuzzed"), *flags, environment=allowed)
    leaks.SHARED[fixture] = relay
    try:
        target = Target(relay)
        yield target
        target.close()
    finally:
        relay.close()
