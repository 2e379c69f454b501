"""Workers are killed in mid-stream; the client's stream goes on with exactly the same tokens."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonlm.v1 import inference_pb2
from tests.e2e.calls import COUNT, call, tool
from tests.e2e.relay import (
    PATIENCE_S,
    Answer,
    Relay,
    eventually,
    happens,
    options,
    until_it_comes_about,
)
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
PROMPT = list(range(50, 250))
NUM_TOKENS = 256
NUMBERS = inference_pb2.StructuredOutput(
    json_schema='{"type":"array","items":{"type":"integer"},"minItems":200}'
)
"""Takes more than NUM_TOKENS."""
FORMS = {
    "greedy": options(max_tokens=NUM_TOKENS),
    "sampled": options(max_tokens=NUM_TOKENS, temperature=1.0, seed=3),
    "structured": options(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, form=NUMBERS),
}
OF_EACH = 4
LOG_S = 10.0
"""In this time the log says who lost a worker, if anybody did."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two of every worker; drafts are in flight when they die."""
    flags = ("--tokenizer", "2", "--prefill", "2", "--decode", "2", "--detokenizer", "2")
    drafts = ("--speculation", "draft", "--draft-model", str(BUNDLED))
    running = Relay(tmp_path_factory.mktemp("pair"), *flags, *drafts)
    yield running
    running.close()


def request_id(answer: Answer) -> str:
    assert answer.accepted is not None
    return answer.accepted.request_id


@pytest.mark.parametrize("role", ["decode", "detokenizer", "prefill"])
def test_kill_in_mid_stream(pair: Relay, role: str) -> None:
    expected = {form: pair.generate(PROMPT, wanted) for form, wanted in FORMS.items()}
    assert all(len(answer.token_ids[0]) == NUM_TOKENS for answer in expected.values())
    asked = [(form, wanted) for form, wanted in FORMS.items() for _ in range(OF_EACH)]

    def killed_in_mid_stream() -> bool:
        pair.wait_for_all()
        streams = Following(pair, [(PROMPT, wanted) for _, wanted in asked])
        streams.settled()
        victim = pair.busiest(role)
        pair.kill(victim)
        left = sum(pair.running("decode").values()) if role == "prefill" else 0
        answers = streams.answers()
        forms: dict[str, str] = {}
        for (form, _), answer in zip(asked, answers, strict=True):
            assert answer.token_ids == expected[form].token_ids
            assert answer.text == expected[form].text
            forms[request_id(answer)] = form
        pair.wait_for_all(gone=victim["pid"])
        if role == "prefill":
            # It was killed before, and so many can only be of every form.
            return left > len(asked) - OF_EACH
        return happens(lambda: {forms.get(one) for one in pair.lost(role)} >= set(FORMS), LOG_S)

    until_it_comes_about(killed_in_mid_stream, "streams of every form under way")


@pytest.mark.parametrize("role", [pytest.param("decode", marks=pytest.mark.slow), "detokenizer"])
def test_kill_in_mid_call(pair: Relay, role: str) -> None:
    pair.wait_for_all()
    tools = [tool("count", COUNT), tool("ring", {})]
    wanted = inference_pb2.ToolChoice(use=inference_pb2.ToolChoice.USE_REQUIRED, name="count")
    reference = call(pair, tools, wanted)
    assert len(json.loads(reference.calls[0][2])["numbers"]) == 90

    def killed_in_mid_call() -> bool:
        pair.wait_for_all()
        killed = False

        def kill(num_deltas: int) -> None:
            nonlocal killed
            if num_deltas >= 5 and not killed:
                pair.kill(pair.busiest(role))
                killed = True

        disturbed = call(pair, tools, wanted, on_delta=kill)
        assert (disturbed.calls, disturbed.content) == (reference.calls, reference.content)
        assert disturbed.finish == reference.finish
        return killed and happens(lambda: disturbed.request_id in pair.lost(role), LOG_S)

    until_it_comes_about(killed_in_mid_call, "a call under way")


@pytest.mark.parametrize("victim", ["the one that leaves", "the one that takes over"])
def test_kill_while_sequences_move(pair: Relay, victim: str) -> None:
    """One decode worker drains; in the middle of it one of the two is killed."""
    pair.wait_for_all()
    expected = [answer.token_ids for answer in undisturbed(pair, requests())]

    def killed_while_they_move() -> bool:
        pair.wait_for_all()
        router = pair.processes("router")[0]
        before = pair.metric(router, "baton_moves_total", outcome="moved")
        streams = Following(pair, requests())
        streams.settled()
        leaving = pair.busiest("decode")
        (replacement,) = [p for p in pair.processes("decode") if p["pid"] != leaving["pid"]]
        pair.kill(leaving, signal.SIGTERM)

        def one_has_moved() -> bool:
            moved = pair.metric(router, "baton_moves_total", outcome="moved") > before
            return moved or pair.idle()

        eventually(one_has_moved, PATIENCE_S, "one has moved, or all have ended")
        pair.kill(leaving if victim == "the one that leaves" else replacement)
        answers = streams.answers()
        assert [answer.token_ids for answer in answers] == expected
        ids = {request_id(answer) for answer in answers}
        return pair.metric(router, "baton_moves_total", outcome="moved") > before and happens(
            lambda: ids & pair.lost("decode"), LOG_S
        )

    until_it_comes_about(killed_while_they_move, "sequences that move")
