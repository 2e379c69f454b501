"""Structured output over every public door; a schema that explodes is its own sender's trouble."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import openai
import pytest
from jsonschema import validate

from batonlm.v1 import inference_pb2 as pb
from tests.e2e.relay import Relay, options
from tests.e2e.streams import Following

pytestmark = pytest.mark.deep

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
        "kind": {"enum": ["big", "small", None]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
EXPLODES = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}


@pytest.fixture(scope="module")
def client(relay: Relay) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{relay.http}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **parameters: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Tell me about yourself."}]
    parameters = {"max_tokens": 300, "temperature": 1.0, "seed": 5, **parameters}
    return client.chat.completions.create(model="baton-tiny", messages=messages, **parameters)


def named(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def test_a_schema_over_both_doors(relay: Relay, client: openai.OpenAI) -> None:
    whole = ask(client, response_format=named(SCHEMA), n=3, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        validate(json.loads(text), SCHEMA)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert len(set(texts)) > 1
    streamed = ask(client, response_format=named(SCHEMA), n=3, stream=True)
    pieces = ["", "", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts
    form = pb.StructuredOutput(json_schema=json.dumps(SCHEMA))
    wanted = options(max_tokens=300, temperature=1.0, seed=5, n=3, ignore_eos=False, form=form)
    over_grpc = relay.chat("Tell me about yourself.", wanted)
    assert [over_grpc.text[number] for number in range(3)] == texts


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"choice": ["yes", 'no "way"', "a/b\\c"]}, r'yes|no "way"|a/b\\c'),
        ({"grammar": 'start: "x" /[0-9]{1,8}/ "y"'}, r"x[0-9]{1,8}y"),
        ({"grammar": 'root ::= "p" [a-c]{1,8} ("!" | "?")'}, r"p[a-c]{1,8}[!?]"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_forms_of_vllm(client: openai.OpenAI, form: dict[str, Any], fits: str) -> None:
    answer = ask(client, extra_body={"structured_outputs": form}, temperature=0.0)
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert re.fullmatch(fits, choice.message.content)
    else:
        assert set(form) == {"json_object"}


def test_what_cannot_be_followed_is_named(relay: Relay, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=named({"type": "thing"}))
    assert refused.value.param == "response_format.json_schema.schema"
    assert "thing" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"structured_outputs": {"regex": "(a"}})
    assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(grpc.RpcError) as failed:
        relay.chat("Hello", options(max_tokens=8, form=pb.StructuredOutput(lark="start: (")))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_schema_that_explodes_is_nobody_elses_trouble(
    relay: Relay, client: openai.OpenAI
) -> None:
    form = pb.StructuredOutput(json_schema=json.dumps(SCHEMA))
    asked = [
        (list(range(60 + i, 160 + i)), options(max_tokens=200, form=form if i % 2 else None))
        for i in range(4)
    ]
    alone = [relay.generate(*one) for one in asked]
    workers = [process["pid"] for process in relay.processes()]
    streams = Following(relay, asked)
    streams.settled()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=named(EXPLODES))
    assert refused.value.param == "response_format.json_schema.schema"
    assert "to compile" in refused.value.message
    beside = streams.answers()
    assert [a.token_ids for a in beside] == [a.token_ids for a in alone]
    assert [a.text for a in beside] == [a.text for a in alone]
    assert [process["pid"] for process in relay.processes()] == workers
