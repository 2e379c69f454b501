"""One trace of one request through five real processes and the death of one, by a real receiver."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from batonlm.v1 import inference_pb2
from tests.e2e.relay import PATIENCE_S, Answer, Relay, options, until_it_comes_about
from tests.receiver import Received, Receiver, receiver

pytestmark = pytest.mark.chaos

PROMPT = list(range(50, 250))
STAGES = {"tokenize", "turn", "prefill", "hand_over", "decode", "detokenize"}
ROLES = ("router", "tokenizer", "prefill", "decode", "detokenizer")
EVERYBODY = {f"baton-{role}" for role in ROLES}
ROOT = "text_completion baton-tiny"
CALLS = ("tokenizer.encode", "prefill.run", "decode.run", "detokenizer.text")
"""A decode worker that is killed never sends its `decode.run`: it was open."""


@pytest.fixture(scope="module")
def exported() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(exported: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_OTLP_ENDPOINT", exported.endpoint)
        running = Relay(tmp_path_factory.mktemp("traced"), "--decode", "2")
    yield running
    running.close()


def test_a_request_that_outlives_its_decode_worker_is_one_trace(
    traced: Relay, exported: Receiver
) -> None:
    traceparent = ""

    def it_lost_its_worker() -> bool:
        nonlocal traceparent
        traced.wait_for_all()
        traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
        asked = inference_pb2.GenerateRequest(options=options(max_tokens=256))
        asked.token_ids.ids.extend(PROMPT)
        answer, before = Answer(), traced.lost_attempts()
        metadata = (("traceparent", traceparent),)
        call = traced.stub.Generate(asked, timeout=PATIENCE_S, metadata=metadata)
        for number, response in enumerate(call):
            answer.take(response.event)
            if number == 5:
                traced.kill(traced.busiest("decode"))
        assert len(answer.token_ids[0]) == 256
        return traced.lost_attempts() > before

    until_it_comes_about(it_lost_its_worker, "a request whose decode worker is killed")
    trace_id = traceparent.split("-")[1]

    def mine(spans: list[Received]) -> list[Received]:
        return [each for each in spans if each.span.trace_id.hex() == trace_id]

    def whole(spans: list[Received]) -> bool:
        return {each.name for each in mine(spans)} >= {ROOT, *CALLS}

    spans = mine(exported.wait_for(whole, PATIENCE_S))
    assert {each.service for each in spans} == EVERYBODY
    (root,) = [each for each in spans if each.name == ROOT]
    assert root.span.parent_span_id.hex() == traceparent.split("-")[2]
    covered = sum(each.seconds for each in spans if each.name in STAGES and each.is_below(root))
    assert 0.95 * root.seconds <= covered <= 1.0001 * root.seconds

    # A busy machine may have taken one more try.
    first, *between, second = [each for each in spans if each.name == "attempt"]
    assert first.attributes["error.type"] == "unavailable"
    assert "error.type" not in second.attributes
    assert [each.attributes["baton.attempt.number"] for each in (first, second)] == [
        0,
        len(between) + 1,
    ]
    assert first.is_below(root) and second.is_below(root)

    request_id = root.attributes["gen_ai.response.id"]
    lines = [line for line in traced.log.read_text().splitlines() if f"trace_id={trace_id}" in line]
    assert lines and all(f"request_id={request_id}" in line for line in lines)

    by_id = {each.span.span_id: each for each in spans}
    above = {"tokenizer.encode": "tokenize", "prefill.run": "attempt", "decode.run": "attempt"}
    for each in spans:
        if each.name in above:
            assert by_id[each.span.parent_span_id].name == above[each.name]
    (decoded,) = [each for each in spans if each.name == "decode.run" and each.is_below(second)]
    assert decoded.instance_id == second.attributes["baton.decode.instance_id"]
    assert decoded.instance_id != first.attributes["baton.decode.instance_id"]
    assert any(each.name == "detokenizer.text" and each.is_below(root) for each in spans)
    assert f"trace_id={trace_id}" in traced.log.read_text()

    traced.wait_for_all()
