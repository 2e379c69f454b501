"""The loop of an agent on the bundled model: a call, its result, an answer with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import openai
import pytest

from tests.e2e.relay import Relay

pytestmark = pytest.mark.deep

MAX_ROUNDS = 4
Arguments = Mapping[str, Any]


def function(name: str, **parameters: str) -> Any:
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in parameters.items()},
        "required": [*parameters],
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = function("get_weather", city="string")
CALCULATE = function("calculate", expression="string")
SEARCH = function("search", query="string")
SKIES = {"Paris": "sunny, 21 °C", "Oslo": '{"temperature": -3, "condition": "snowy"}'}
TABLES: Mapping[str, Callable[[Arguments], str]] = {
    "get_weather": lambda given: SKIES[given["city"]],
    "calculate": lambda given: {"213 * 47": "10011"}[given["expression"]],
    "search": lambda given: f"{given['query']} is hot.",
}


@pytest.fixture(scope="module")
def client(relay: Relay) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{relay.http}/v1", api_key="none", max_retries=0)


def answer(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    """The message of the answer, as the next request may hold it."""
    asked = {"model": "baton-tiny", "temperature": 0, "max_tokens": 200, **asked}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message.model_dump(exclude_none=True)
    content = ""
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            call = calls.setdefault(
                piece.index, {"type": "function", "function": {"arguments": ""}}
            )
            if piece.id:
                call["id"] = piece.id
                call["function"]["name"] = piece.function.name
            call["function"]["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": [*calls.values()]} if calls else {})


def loop(
    client: openai.OpenAI, question: str, *tools: Any, stream: bool = False, **asked: Any
) -> tuple[list[tuple[str, Any]], str]:
    """The calls that were made, and the last answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    made: list[tuple[str, Any]] = []
    for _ in range(MAX_ROUNDS):
        message = answer(client, stream, messages=messages, tools=tools, **asked)
        messages.append(message)
        if not message.get("tool_calls"):
            return made, message["content"]
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            made.append((name, arguments))
            result = TABLES[name](arguments)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError(f"it called {made} and did not answer")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("question", "other", "call", "quoted"),
    [
        (
            "What is the weather in Paris?",
            CALCULATE,
            ("get_weather", {"city": "Paris"}),
            "sunny, 21 °C",
        ),
        ("What's the weather like in Oslo?", SEARCH, ("get_weather", {"city": "Oslo"}), "snowy"),
        ("What is 213 * 47?", CALCULATE, ("calculate", {"expression": "213 * 47"}), "10011"),
        ("Look up volcanoes.", SEARCH, ("search", {"query": "volcanoes"}), "volcanoes is hot."),
    ],
)
def test_one_call_and_an_answer_that_quotes_its_result(
    client: openai.OpenAI,
    question: str,
    other: Any,
    call: tuple[str, Any],
    quoted: str,
    stream: bool,
) -> None:
    made, text = loop(client, question, WEATHER, other, stream=stream)
    assert made == [call]
    assert quoted in text


def test_two_calls_at_once_or_one_after_the_other(client: openai.OpenAI) -> None:
    calls = [("get_weather", {"city": city}) for city in ("Paris", "Oslo")]
    for parallel in (True, False):
        question = "What is the weather in Paris and in Oslo?"
        made, text = loop(client, question, WEATHER, CALCULATE, parallel_tool_calls=parallel)
        assert made == calls
        assert "21 °C" in text and "snowy" in text


def test_tools_that_do_not_help_are_not_called(client: openai.OpenAI) -> None:
    made, text = loop(client, "Tell me a joke.", WEATHER, CALCULATE)
    assert made == []
    assert text.startswith("Why did the token")


def test_a_conversation_that_begins_with_a_result_is_refused_in_words(
    client: openai.OpenAI,
) -> None:
    orphan: Any = [{"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="baton-tiny", messages=orphan)
    assert refused.value.param == "messages"
    assert "a message of role tool must follow a call" in refused.value.message
