"""A decode worker leaves in order: its streams go on elsewhere, with their KV, token for token."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.relay import Answer, Relay, until_it_comes_about
from tests.e2e.streams import TOKENS, Following, requests, undisturbed

Process = dict[str, Any]

MANY = 12


def computed_by(relay: Relay, workers: Sequence[Process]) -> float:
    """Input tokens whose KV these have computed."""
    return sum(relay.metric(worker, "baton_prefill_tokens_total") for worker in workers)


def came_with_kv(relay: Relay, worker: Process) -> float:
    """Sequences whose KV came from another worker, or was here from the undisturbed run."""
    return sum(
        relay.metric(worker, "baton_kv_source_total", source=source)
        for source in ("moved", "cache")
    )


def usage(answer: Answer) -> tuple[int, int]:
    assert answer.finished is not None
    return answer.finished.prompt_tokens, answer.finished.completion_tokens


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_streams_move_with_their_kv_when_a_decode_worker_drains(relay: Relay) -> None:
    relay.wait_for_all()
    stop = undisturbed(relay, requests()[3:4])[0].text[0][-40:-34]
    expected = undisturbed(relay, requests(stop))
    assert len(expected[3].token_ids[0]) < TOKENS, "the stop string is found"
    router = relay.processes("router")[0]

    def they_move() -> bool:
        streams = Following(relay, requests(stop))
        streams.settled()
        leaving = relay.busiest("decode")
        there = relay.metric(leaving, "baton_sequences")
        if there < MANY:
            streams.answers()
            return False
        migrations = relay.metric(router, "baton_migrations_total")
        moved = relay.metric(router, "baton_moves_total", reason="drain", outcome="moved")
        replacement = next(p for p in relay.processes("decode") if p["pid"] != leaving["pid"])
        staying = [*relay.processes("prefill"), replacement]
        computed = computed_by(relay, staying)
        collected = came_with_kv(relay, replacement)
        relay.kill(leaving, signal.SIGTERM)
        answers = streams.answers()

        for answer, wanted in zip(answers, expected, strict=True):
            assert answer.token_ids == wanted.token_ids
            assert (answer.text, answer.finish) == (wanted.text, wanted.finish)
            assert usage(answer) == usage(wanted)
        gone = relay.metric(router, "baton_moves_total", reason="drain", outcome="moved") - moved
        # Some may end, by their text or their length, before it is their turn.
        assert gone <= there
        assert came_with_kv(relay, replacement) - collected == gone
        assert relay.metric(router, "baton_migrations_total") == migrations
        assert computed_by(relay, staying) == computed
        relay.wait_for_all(gone=leaving["pid"])
        return gone > 0

    until_it_comes_about(they_move, f"{MANY} sequences on a worker that leaves")
