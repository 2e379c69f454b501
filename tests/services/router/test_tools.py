"""Calls of tools and reasoning from a model's text to its clients, over HTTP and gRPC.

The model says what the test writes; everything between it and the client is real, but for the
text of one token a byte.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.request.attempt import AttemptKey
from batonlm.core.request.model import AnswerFormat
from batonlm.core.request.request import (
    ChatPrompt,
    FinishReason,
    Message,
    Request,
    Tool,
    ToolChoice,
    ToolUse,
)
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.http.server import serve_http
from batonlm.router.config import RouterConfig
from batonlm.testing import language
from batonlm.testing.language import says
from batonlm.testing.scripted import ScriptedTokenizer
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import busy
from tests.services.router_http.scripted import openai_client
from tests.services.router_http.test_messages import events_of, joined

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time", "description": "What time it is"}},
]
TWO_CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CITY = '{"city": "Bern"}'


@dataclass
class Face:
    client: openai.AsyncOpenAI
    world: World

    async def ask(self, text: str, **options: Any) -> Any:
        return await self.client.chat.completions.create(
            model="made-up", messages=[{"role": "user", "content": says(text)}], **options
        )

    async def stream(self, text: str, **options: Any) -> list[Any]:
        stream = await self.ask(text, stream=True, **options)
        return [chunk async for chunk in stream]


@pytest.fixture
async def face(world: World) -> AsyncIterator[Face]:
    model = replace(language.MODEL, answer_format=AnswerFormat(reasoning="think"))
    world.tokenizers.append(ScriptedTokenizer(model=model))
    await world.start(RouterConfig(local_prefill_tokens=0), tokenizers=0, decodes=2, detokenizers=2)
    access = HttpAccess(OpenAuthenticator())
    server = await serve_http(HttpApp(world.pipeline, CollectorRegistry(), access), "127.0.0.1:0")
    try:
        async with openai_client(server.address) as client:
            yield Face(client, world)
    finally:
        await server.close()


async def test_calls_in_one_document(face: Face) -> None:
    answer = await face.ask(TWO_CALLS, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("weather", CITY)
    assert (second.function.name, second.function.arguments) == ("time", "{}")
    assert first.type == "function" and first.id != second.id
    assert first.id.startswith("call_") and len(first.id) == 29


async def test_content_is_null_when_there_are_only_calls(face: Face) -> None:
    answer = await face.ask(TWO_CALLS.partition("\n")[2], tools=TOOLS)
    assert answer.choices[0].message.content is None
    assert len(answer.choices[0].message.tool_calls) == 2


async def test_arguments_stream(face: Face) -> None:
    for decode in face.world.decodes:
        decode.last_position = TWO_CALLS.index("Bern")
    chunks = []
    async for chunk in await face.ask(TWO_CALLS, tools=TOOLS, seed=5, stream=True):
        chunks.append(chunk)
        if any(call.function.arguments for call in chunk.choices[0].delta.tool_calls or ()):
            # They come before the model has written all of them.
            for decode in face.world.decodes:
                decode.last_position = None
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.id] == [
        (0, "weather"),
        (1, "time"),
    ]
    assert "".join(call.function.arguments for call in calls if call.index == 0) == CITY
    assert "".join(call.function.arguments for call in calls if call.index == 1) == "{}"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    again = await face.ask(TWO_CALLS, tools=TOOLS, seed=5)
    assert [call.id for call in again.choices[0].message.tool_calls] == [
        call.id for call in calls if call.id
    ]


def made(world: World) -> int:
    """Tokens so far of what has not ended."""
    return sum(
        len(decode.running[AttemptKey(key.request_id, key.attempt)].outputs[key.choice])
        for decode in world.decodes
        for key in decode.holds()
    )


@pytest.mark.deep
@pytest.mark.parametrize("role", ["decode", "detokenizer"])
async def test_a_death_changes_no_byte_of_a_stream(face: Face, role: str) -> None:
    text = "<think>\nhm\n</think>\n\n" + TWO_CALLS.replace("Bern", "Bern " * 8)
    reference = await face.ask(text, tools=TOOLS, seed=1)
    for decode in face.world.decodes:
        decode.last_position = 60
    chunks = []
    async for chunk in await face.ask(text, tools=TOOLS, seed=1, stream=True):
        chunks.append(chunk.choices[0].delta)
        if len(chunks) == 1:
            await until(lambda: made(face.world) > 60)
            victim: Any = busy(face.world)
            if role == "detokenizer":
                victim = next(d for d in face.world.detokenizers if d.texts)
            await victim.kill()
            for decode in face.world.decodes:
                decode.last_position = None
    message = reference.choices[0].message
    assert "".join(delta.content or "" for delta in chunks) == message.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in chunks) == "hm"
    calls = [call for delta in chunks for call in delta.tool_calls or ()]
    assert [call.id for call in calls if call.id] == [call.id for call in message.tool_calls]
    for index, whole in enumerate(message.tool_calls):
        pieces = [call.function.arguments for call in calls if call.index == index]
        assert "".join(pieces) == whole.function.arguments


async def test_no_tools_no_calls(face: Face) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await face.ask(TWO_CALLS, **options)).choices
        assert choice.message.content == TWO_CALLS and not choice.message.tool_calls
        assert choice.finish_reason == "stop"


async def test_a_call_that_is_cut_is_no_end_in_calls(face: Face) -> None:
    (choice,) = (await face.ask(TWO_CALLS, tools=TOOLS, max_tokens=70)).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert CITY.startswith(call.function.arguments) and call.function.arguments != CITY
    (choice,) = (await face.ask(TWO_CALLS, tools=TOOLS, stop=["</tool_call>"])).choices
    assert choice.finish_reason == "stop" and len(choice.message.tool_calls) == 1


async def test_reasoning(face: Face) -> None:
    text = "<think>\nIt is\nlate.\n</think>\n\nGood night."
    answer = await face.ask(text)
    message = answer.choices[0].message
    assert message.content == "Good night."
    assert message.reasoning == message.reasoning_content == "It is\nlate."
    # This model has no token that ends reasoning: what is in one delta with its end counts, too.
    told = answer.usage.completion_tokens_details.reasoning_tokens
    assert text.index("\n\nGood") <= told < answer.usage.completion_tokens
    chunks = await face.stream(text)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "It is\nlate."
    assert "".join(d.content or "" for d in deltas) == "Good night."
    left_out = await face.ask(text, extra_body={"include_reasoning": False})
    assert not hasattr(left_out.choices[0].message, "reasoning")
    assert left_out.choices[0].message.content == "Good night."


async def test_a_conversation_with_calls_reaches_the_tokenizer(face: Face) -> None:
    first = await face.ask(TWO_CALLS, tools=TOOLS)
    made = first.choices[0].message
    messages: Any = [
        {"role": "user", "content": "What is the weather?"},
        made.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "rain"},
        {"role": "user", "content": says("Rain.")},
    ]
    answer = await face.client.chat.completions.create(
        model="made-up", messages=messages, tools=TOOLS
    )
    assert answer.choices[0].message.content == "Rain."
    assert answer.choices[0].finish_reason == "stop"
    chat = face.world.tokenizers[0].chats[-1]
    assert [tool.name for tool in chat.tools] == ["weather", "time"]
    assert json.loads(chat.tools[0].parameters) == {"type": "object"}
    assert chat.messages[1].tool_calls[0].name == "weather"
    assert json.loads(chat.messages[1].tool_calls[0].arguments) == json.loads(CITY)
    assert chat.messages[2].tool_call_id == made.tool_calls[0].id


async def test_thinking_and_calls_are_blocks_of_a_message(face: Face) -> None:
    """Anthropic's API, over the same answers."""
    tools = [
        {"name": "weather", "input_schema": {"type": "object"}},
        {"name": "time", "input_schema": {"type": "object"}},
    ]
    asked: Any = {
        "max_tokens": 1 << 20,
        "seed": 5,
        "tools": tools,
        "messages": [{"role": "user", "content": says("<think>\nhm\n</think>\n\n" + TWO_CALLS)}],
    }
    async with httpx.AsyncClient(
        base_url=str(face.client.base_url), timeout=120, trust_env=False
    ) as http:
        key = {"idempotency-key": "once"}
        message = (await http.post("messages", json=asked, headers=key)).json()
        streamed = await http.post("messages", json=asked | {"stream": True}, headers=key)
        again = joined(events_of(streamed.text))
        # The same run.
        assert again["id"] == message["id"]
        assert again["content"] == message["content"] and again["usage"] == message["usage"]
        thinking, text, *calls = message["content"]
        assert (thinking["thinking"], text["text"]) == ("hm", "Let me look.")
        assert [(call["name"], call["input"]) for call in calls] == [
            ("weather", {"city": "Bern"}),
            ("time", {}),
        ]
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in calls
        ]
        asked["messages"] = [
            {"role": "user", "content": "What is the weather?"},
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": says("Rain.")}]},
        ]
        last = (await http.post("messages", json=asked)).json()
        assert [block["text"] for block in last["content"]] == ["Rain."]
        assert last["stop_reason"] == "end_turn"
        counted = (await http.post("messages/count_tokens", json=asked)).json()
        usage = last["usage"]
        assert counted["input_tokens"] == sum(
            usage[name] for name in ("input_tokens", "cache_read_input_tokens")
        )
    chat = face.world.tokenizers[0].chats[-1]
    assert chat.messages[1].reasoning == "hm"


def asked(text: str, choice: ToolChoice) -> Request:
    tools = (Tool("weather"), Tool("time"))
    return Request(ChatPrompt((Message("user", says(text)),), tools=tools, tool_choice=choice))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (ToolChoice(ToolUse.REQUIRED), FinishReason.TOOL_CALLS),
        (ToolChoice(ToolUse.REQUIRED, "weather"), FinishReason.STOP),
        (ToolChoice(parallel=False), FinishReason.TOOL_CALLS),
    ],
)
async def test_calls_that_are_forced_are_checked_first(
    world: World, choice: ToolChoice, reason: FinishReason
) -> None:
    """The grammar reaches a tokenizer before any worker computes, and then every attempt."""
    await world.start()
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    answer = await world.ask(asked(call, choice))
    assert answer.reason() is reason
    (_, checked) = world.tokenizers[0].grammars
    assert '\\"weather\\"' in checked.text
    assert ('\\"time\\"' in checked.text) == (not choice.name)
    await until(world.nothing_left)


async def test_an_operator_may_have_no_calls_read(world: World) -> None:
    await world.start(RouterConfig(tool_format="none"))
    answer = await world.ask(asked(TWO_CALLS, ToolChoice()))
    assert answer.texts[0] == TWO_CALLS
    with pytest.raises(Exception, match="tool_choice"):
        await world.ask(asked(TWO_CALLS, ToolChoice(ToolUse.REQUIRED)))
