"""`baton explain` of requests that ran on a real set of five processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.relay import Relay, options

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    running = Relay(tmp_path_factory.mktemp("explained"), "--decode", "2")
    yield running
    running.close()


def explained(relay: Relay, request_id: str) -> dict[str, Any]:
    done = relay.baton("explain", request_id, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_long_prompt_ran_apart(relay: Relay) -> None:
    answer = relay.generate(TEXT, options(max_tokens=8))
    assert answer.accepted is not None
    told = explained(relay, answer.accepted.request_id)
    assert told["state"] == "finished"
    assert told["split"]["configured"] and told["split"]["used"]
    assert told["kv_bytes"] > 0
    picture = relay.baton("explain", answer.accepted.request_id)
    assert "Prefill and decode ran apart" in picture.stdout
    assert "hand-over" in picture.stdout and TEXT[:9] not in picture.stdout
