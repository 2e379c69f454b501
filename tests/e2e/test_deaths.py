"""Workers are killed in mid-stream; the client's stream goes on with exactly the same tokens."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator

import pytest

from batonlm.v1 import inference_pb2
from tests.e2e.calls import COUNT, call, tool
from tests.e2e.relay import Answer, Relay, eventually, options
from tests.e2e.streams import Following, requests, undisturbed

pytestmark = pytest.mark.chaos

PROMPT = list(range(50, 250))
NUMBERS = inference_pb2.StructuredOutput(
    json_schema='{"type":"array","items":{"type":"integer"},"minItems":200}'
)
"""Takes more than 256 tokens."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """Two of every worker."""
    flags = ("--tokenizer", "2", "--prefill", "2", "--decode", "2", "--detokenizer", "2")
    running = Relay(tmp_path_factory.mktemp("pair"), *flags)
    yield running
    running.close()


def wait_for_all(relay: Relay) -> None:
    """Until every killed worker is back and the router has seen it."""
    eventually(lambda: len(relay.processes()) == 9, 60, "all processes listed")

    def serving() -> bool:
        return relay.metric(relay.processes("router")[0], "baton_workers", state="serving") == 8

    eventually(serving, 60, "all workers serving")


@pytest.mark.parametrize("role", ["decode", "detokenizer", "prefill"])
@pytest.mark.parametrize(
    ("temperature", "form"),
    [(0.0, None), (1.0, None), (1.0, NUMBERS)],
    ids=["greedy", "sampled", "structured"],
)
def test_kill_in_mid_stream(
    pair: Relay, role: str, temperature: float, form: inference_pb2.StructuredOutput | None
) -> None:
    wait_for_all(pair)
    wanted = options(max_tokens=256, temperature=temperature, seed=3, form=form)
    reference = pair.generate(PROMPT, wanted)
    assert len(reference.token_ids[0]) == 256

    answers: list[Answer] = [Answer() for _ in range(4)]
    failures: list[BaseException] = []
    started = threading.Barrier(5)

    def follow(answer: Answer) -> None:
        try:
            for number, response in enumerate(pair.stream(PROMPT, wanted)):
                answer.take(response.event)
                if number == 4:
                    started.wait(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(answer,)) for answer in answers]
    for thread in threads:
        thread.start()
    started.wait(60)
    victims = pair.processes(role)
    busy = [v for v in victims if role != "decode" or pair.metric(v, "baton_sequences") > 0]
    pair.kill(busy[0])
    for thread in threads:
        thread.join(100)
    assert not failures, failures
    for answer in answers:
        assert answer.token_ids == reference.token_ids
        assert answer.text == reference.text
    wait_for_all(pair)
    assert busy[0]["pid"] not in [p["pid"] for p in pair.processes(role)]


@pytest.mark.parametrize("role", ["decode", "detokenizer"])
def test_kill_in_mid_call(pair: Relay, role: str) -> None:
    wait_for_all(pair)
    tools = [tool("count", COUNT), tool("ring", {})]
    wanted = inference_pb2.ToolChoice(use=inference_pb2.ToolChoice.USE_REQUIRED, name="count")
    reference = call(pair, tools, wanted)
    assert len(json.loads(reference.calls[0][2])["numbers"]) == 90
    killed: list[int] = []

    def kill(num_deltas: int) -> None:
        if num_deltas >= 20 and not killed:
            busy = [p for p in pair.processes(role) if pair.metric(p, "baton_sequences") > 0]
            pair.kill(busy[0])
            killed.append(busy[0]["pid"])

    disturbed = call(pair, tools, wanted, on_delta=kill)
    assert killed
    assert (disturbed.calls, disturbed.content) == (reference.calls, reference.content)
    assert disturbed.finish == reference.finish
    wait_for_all(pair)


@pytest.mark.parametrize("victim", ["the one that leaves", "the one that takes over"])
def test_kill_while_sequences_move(pair: Relay, victim: str) -> None:
    """One decode worker drains; in the middle of it one of the two is killed."""
    wait_for_all(pair)
    expected = [answer.token_ids for answer in undisturbed(pair, requests())]
    router = pair.processes("router")[0]
    before = pair.metric(router, "baton_moves_total", outcome="moved")
    streams = Following(pair, requests())
    streams.settled()
    decodes = sorted(pair.processes("decode"), key=lambda p: pair.metric(p, "baton_sequences"))
    replacement, leaving = decodes
    pair.kill(leaving, signal.SIGTERM)
    eventually(
        lambda: pair.metric(router, "baton_moves_total", outcome="moved") > before,
        60,
        "one has moved",
    )
    pair.kill(leaving if victim == "the one that leaves" else replacement)
    assert [answer.token_ids for answer in streams.answers()] == expected
    wait_for_all(pair)
