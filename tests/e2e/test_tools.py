"""Tools that the bundled model was not made for: what it calls is forced."""

from __future__ import annotations

import json
from typing import Any, cast

import openai
import pytest
from jsonschema import validate

from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import types_pb2
from tests.e2e.calls import NOTE, call, tool
from tests.e2e.relay import Relay

TOOLS: Any = [
    {"type": "function", "function": {"name": "take_note", "parameters": NOTE}},
    {"type": "function", "function": {"name": "ring"}},
]
BAD: Any = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": 5}}}},
    }
]
CHOICE: Any = {"type": "function", "function": {"name": "take_note"}}


@pytest.fixture(scope="module")
def client(relay: Relay) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{relay.http}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **parameters: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Take a note, please."}]
    parameters = {"max_tokens": 400, "temperature": 1.0, "seed": 4, "tools": TOOLS, **parameters}
    return client.chat.completions.create(model="baton-tiny", messages=messages, **parameters)


def test_a_named_call_over_both_doors(relay: Relay, client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=CHOICE).choices
    assert choice.finish_reason == "stop" and choice.message.content is None
    (made,) = choice.message.tool_calls
    assert made.function.name == "take_note"
    validate(json.loads(made.function.arguments), NOTE)
    pieces = [
        piece
        for chunk in ask(client, tool_choice=CHOICE, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    # How many pieces there are is the machine's affair: what is ready together goes out together.
    assert pieces[0].function.name == "take_note" and not any(p.id for p in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == made.function.arguments
    named = pb.ToolChoice(use=pb.ToolChoice.USE_REQUIRED, name="take_note")
    over_grpc = call(relay, [tool("take_note", NOTE), types_pb2.Tool(name="ring")], named)
    assert over_grpc.calls == {0: [over_grpc.calls[0][0], "take_note", made.function.arguments]}


def test_required_calls_one_or_more(client: openai.OpenAI) -> None:
    for several in (True, False):
        (choice,) = ask(client, tool_choice="required", parallel_tool_calls=several).choices
        calls = choice.message.tool_calls
        assert calls and (several or len(calls) == 1)
        if choice.finish_reason == "tool_calls":
            for made in calls:
                schema = NOTE if made.function.name == "take_note" else {"const": {}}
                validate(json.loads(made.function.arguments), schema)
        else:
            assert several and choice.finish_reason == "length"


def test_parallel_calls_are_read_as_the_model_likes(client: openai.OpenAI) -> None:
    said = (
        'I do.\n<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "take_note", "arguments": {"kind": "big"}}\n</tool_call>'
    )
    form = {"structured_outputs": {"choice": [said]}}
    (choice,) = ask(client, extra_body=form).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I do."
    made = [(made.function.name, made.function.arguments) for made in choice.message.tool_calls]
    assert made == [("ring", "{}"), ("take_note", '{"kind": "big"}')]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TOOL_CALL = "2046"
"""The bundled model's token `<tool_call>`."""
REPORT = {
    "type": "object",
    "properties": {"sky": {"enum": ["sunny", "snowy"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}


def test_an_answer_is_calls_or_follows_its_schema(client: openai.OpenAI) -> None:
    """The model decides: it calls where a tool helps, and else answers, as it must."""
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}

    def answer(question: str, **more: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": question}]
        (choice,) = client.chat.completions.create(
            model="baton-tiny",
            messages=messages,
            tools=[WEATHER],
            response_format=cast(Any, form),
            temperature=0,
            **more,
        ).choices
        return choice

    choice = answer("What is the weather in Paris?")
    assert choice.finish_reason == "tool_calls"
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Paris"}
    # The token that begins calls is ruled out.
    choice = answer("What is the weather in Paris?", logit_bias={TOOL_CALL: -100})
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    validate(json.loads(choice.message.content), REPORT)


def test_parameters_that_cannot_be_followed_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=BAD, tool_choice="required")
    assert refused.value.param == "tools"
