"""A decode worker leaves in order: its streams go on elsewhere, with their KV, token for token."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from tests.e2e.relay import Answer, Relay, eventually
from tests.e2e.streams import TOKENS, Asked, Following, requests, undisturbed

Process = dict[str, Any]


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


def both_serve(relay: Relay, gone: int = 0) -> bool:
    """The router knows two decode workers, and none of them is the process that went."""
    if gone in [p["pid"] for p in relay.processes("decode")]:
        return False
    live = relay.metric(
        relay.processes("router")[0], "baton_workers", role="decode", state="serving"
    )
    return live == 2


def many_running(relay: Relay, asked: Sequence[Asked]) -> tuple[Following, Process, float]:
    """Streams under way, the decode worker that runs most of them, and how many: at least 12.

    A machine that is busy elsewhere may begin the last of them when the first have ended. Then they
    begin again."""
    for _ in range(10):
        streams = Following(relay, asked)
        streams.settled()
        running = {
            p["pid"]: relay.metric(p, "baton_sequences", state="running")
            for p in relay.processes("decode")
        }
        most = max(relay.processes("decode"), key=lambda p: running[p["pid"]])
        if running[most["pid"]] >= 12:
            return streams, most, running[most["pid"]]
        streams.answers()
    raise AssertionError("there were never 12 sequences running on one worker")


@pytest.mark.deep
def test_streams_move_with_their_kv_when_a_decode_worker_drains(relay: Relay) -> None:
    eventually(lambda: both_serve(relay), 60, "two decode workers")
    stop = undisturbed(relay, requests()[3:4])[0].text[0][-40:-34]
    expected = undisturbed(relay, requests(stop))
    assert len(expected[3].token_ids[0]) < TOKENS, "the stop string is found"

    router = relay.processes("router")[0]
    streams, leaving, there = many_running(relay, requests(stop))
    migrations = relay.metric(router, "baton_migrations_total")
    moved = relay.metric(router, "baton_moves_total", outcome="moved")
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
    gone = relay.metric(router, "baton_moves_total", outcome="moved") - moved
    # Some may end, by their text or their length, before it is their turn.
    assert 0 < gone <= there
    assert came_with_kv(relay, replacement) - collected == gone
    assert relay.metric(replacement, "baton_kv_source_total", source="moved") > 0
    assert relay.metric(router, "baton_migrations_total") == migrations
    assert computed_by(relay, staying) == computed
    eventually(lambda: both_serve(relay, leaving["pid"]), 60, "another one in its place")
