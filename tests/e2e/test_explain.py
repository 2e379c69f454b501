"""`baton explain` and `baton replay` of requests that ran on real sets of five processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.relay import Answer, Relay, options, until_it_comes_about

pytestmark = pytest.mark.deep

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
SAMPLED = options(max_tokens=200, temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two decode workers; its router keeps what is needed to replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_KEEP_REPLAYS", "true")
        running = Relay(tmp_path_factory.mktemp("explained"), "--decode", "2")
    yield running
    running.close()


def explained(relay: Relay, request_id: str) -> dict[str, Any]:
    done = relay.baton("explain", request_id, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_long_prompt_ran_apart(keeping: Relay) -> None:
    answer = keeping.generate(TEXT, options(max_tokens=8))
    assert answer.accepted is not None
    told = explained(keeping, answer.accepted.request_id)
    assert told["state"] == "finished"
    assert told["split"]["configured"] and told["split"]["used"]
    assert told["kv_bytes"] > 0
    picture = keeping.baton("explain", answer.accepted.request_id)
    assert "Prefill and decode ran apart" in picture.stdout
    assert "hand-over" in picture.stdout and TEXT[:9] not in picture.stdout


def test_a_migrated_request_is_replayed_by_other_processes(
    keeping: Relay, relay: Relay, tmp_path: Path
) -> None:
    """Migrated here; replayed by another Baton, where nothing happens."""
    request_id = ""

    def it_migrated() -> bool:
        nonlocal request_id
        keeping.wait_for_all()
        answer, killed, before = Answer(), False, keeping.lost_attempts()
        for response in keeping.stream(TEXT, SAMPLED):
            answer.take(response.event)
            if not killed and len(answer.token_ids.get(0, ())) >= 20:
                keeping.kill(keeping.busiest("decode"))
                killed = True
        assert killed and len(answer.token_ids[0]) == 200
        assert answer.accepted is not None
        request_id = answer.accepted.request_id
        return keeping.lost_attempts() > before

    until_it_comes_about(it_migrated, "a request whose decode worker is killed")
    told = explained(keeping, request_id)
    # A busy machine may have taken one more try.
    first, *_, last = told["attempts"]
    assert first["state"] == "failed" and first["prefill"] is not None
    assert last["state"] == "ended" and last["position"] >= 20
    file = tmp_path / "replay.json"
    kept = keeping.baton("explain", request_id, "--replay", str(file))
    assert kept.returncode == 0, kept.stderr
    assert json.loads(file.read_text())["exact"]
    again = relay.baton("replay", str(file))
    assert (again.returncode, again.stdout) == (0, "choice 0: 200 tokens, the same\n")
    changed = json.loads(file.read_text())
    changed["sampling"]["seed"] += 1
    file.write_text(json.dumps(changed))
    other = relay.baton("replay", str(file))
    assert other.returncode == 1 and "OTHER tokens" in other.stdout
    changed["model"]["digest"] = "0" * 64
    file.write_text(json.dumps(changed))
    foreign = relay.baton("replay", str(file))
    assert foreign.returncode == 1 and "other weights" in foreign.stderr
