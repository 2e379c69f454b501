"""Every way to ask for a form over HTTP, and over gRPC, becomes the same Grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.router.api.grpc.inference import chat_from_proto
from batonlm.router.api.http.parse import parse_chat, parse_completion
from batonlm.router.api.translation import in_client_words
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1.tokenizer_pb2 import ChatMessage

SCHEMA = '{"type": "object", "properties": {"b": {}, "a": {}}}'


def http(**parameters: Any) -> Grammar | None:
    messages = [{"role": "user", "content": "hello"}]
    chat = parse_chat(json.dumps({"messages": messages, **parameters}).encode())
    completion = parse_completion(json.dumps({"prompt": "hello", **parameters}).encode())
    assert chat.requests[0].grammar == completion.requests[0].grammar
    assert not chat.ignored
    return chat.requests[0].grammar


def grpc(form: pb.StructuredOutput | None) -> Grammar | None:
    options = pb.GenerationOptions(structured_output=form)
    messages = [ChatMessage(role="user", content="hello")]
    return chat_from_proto(pb.ChatRequest(messages=messages, options=options), None).grammar


def by_openai(schema: object) -> dict[str, Any]:
    form = {"name": "n", "strict": True, "description": "d", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


@pytest.mark.parametrize(
    ("parameters", "form", "kind", "text"),
    [
        (
            {"response_format": {"type": "json_object"}},
            pb.StructuredOutput(json_object=True),
            GrammarKind.JSON_SCHEMA,
            '{"type":"object"}',
        ),
        (
            by_openai(json.loads(SCHEMA)),
            pb.StructuredOutput(json_schema=SCHEMA),
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            pb.StructuredOutput(json_schema=SCHEMA),
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            pb.StructuredOutput(regex="a+"),
            GrammarKind.REGEX,
            "a+",
        ),
        (
            {"structured_outputs": {"choice": ["a1", "b|é"]}},
            pb.StructuredOutput(choice=pb.TextChoice(texts=["a1", "b|é"])),
            GrammarKind.REGEX,
            r"a1|b\x{7C}\x{E9}",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            pb.StructuredOutput(lark='start: "a"'),
            GrammarKind.LARK,
            'start: "a"',
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            pb.StructuredOutput(gbnf='root ::= "a"'),
            GrammarKind.GBNF,
            'root ::= "a"',
        ),
    ],
)
def test_one_grammar(
    parameters: dict[str, Any], form: pb.StructuredOutput, kind: GrammarKind, text: str
) -> None:
    assert http(**parameters) == grpc(form) == Grammar(kind, text)


def test_no_form_is_no_grammar() -> None:
    assert http() is None
    assert http(response_format={"type": "text"}, structured_outputs={}) is None
    assert http(response_format=None, structured_outputs=None) is None
    assert http(structured_outputs={"json_object": False}) is None
    assert grpc(None) is None
    assert grpc(pb.StructuredOutput(json_object=False)) is None


def test_what_a_tokenizer_says_is_told_of_the_clients_own_field() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **by_openai({"type": "thing"})}
    call = parse_chat(json.dumps(body).encode())
    said = in_client_words(
        InvalidArgument("cannot be followed: thing", field="grammar"), call.names
    )
    assert said.field == "response_format.json_schema.schema"
    assert said.message == "response_format.json_schema.schema cannot be followed: thing"
