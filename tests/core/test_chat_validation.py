"""Conversations and tools: what is refused, and the field that is named."""

from __future__ import annotations

from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import ChatPrompt, Message, Tool, ToolCall, ToolChoice, ToolUse
from batonlm.core.request.validation import MAX_SCHEMA_BYTES, MAX_TOOLS, check_chat

USER = Message("user", "hi")
TOOL = Tool("f", "Does f", '{"type": "object", "properties": {"a": {}}, "required": ["a"]}')
CALL = ToolCall("c1", "f", '{"a": 1}')
DEEP = '{"a": ' * 40 + "1" + "}" * 40


def calling(call: ToolCall) -> Message:
    return Message("assistant", "", tool_calls=(call,))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message("tool", "1"), "tool_call_id"),
        (Message("user", "1", tool_call_id="c1"), "tool_call_id"),
        (Message("tool", "1", tool_call_id="c" * 257), "tool_call_id"),
        (Message("user", "1", tool_calls=(CALL,)), "tool_calls"),
        (Message("user", "1", reasoning="hm"), "reasoning"),
        (Message("user", "1", name="n" * 257), "name"),
        (Message("user", "1", name="\ud800"), "name"),
        (Message("assistant", "", tool_calls=(CALL,) * 129), "tool_calls"),
        (calling(ToolCall("", "f", "{}")), "tool_calls[0].id"),
        (calling(ToolCall("c1", "", "{}")), "tool_calls[0].name"),
        (calling(ToolCall("c1", "f", "\ud800")), "tool_calls[0].arguments"),
        (calling(ToolCall("c1", "f", r'{"a": [{"\ud800": 1}]}')), "tool_calls[0].arguments"),
        (calling(ToolCall("c1", "f", r'"\uDFff"')), "tool_calls[0].arguments"),
        (calling(ToolCall("c1", "f", r'"\ude00\ud83d"')), "tool_calls[0].arguments"),
    ],
)
def test_messages_are_refused(message: Message, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_chat(ChatPrompt((USER, message)))
    assert raised.value.field == f"messages[1].{field}"


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([Tool("")], ToolChoice(), "tools[0].name"),
        ([TOOL, Tool("a b")], ToolChoice(), "tools[1].name"),
        ([Tool("é")], ToolChoice(), "tools[0].name"),
        ([Tool("f" * 129)], ToolChoice(), "tools[0].name"),
        ([Tool("f", "\ud800")], ToolChoice(), "tools[0].description"),
        ([Tool("f", "x" * (1 << 20)), TOOL], ToolChoice(), "tools"),
        ([Tool("f", "", "{")], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", "[]")], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", '{"type": "string"}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", '{"properties": []}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", '{"required": 1}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", '{"minimum": NaN}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", DEEP)], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", r'{"a": "\ud800"}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", r'{"properties": {"\udc00": {}}}')], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", "[" * 60_000)], ToolChoice(), "tools[0].parameters"),
        ([Tool("f", "", " " * (MAX_SCHEMA_BYTES + 1))], ToolChoice(), "tools[0].parameters"),
        ([TOOL, TOOL], ToolChoice(), "tools"),
        ([Tool(f"f{i}") for i in range(MAX_TOOLS + 1)], ToolChoice(), "tools"),
        ([TOOL], ToolChoice(ToolUse.REQUIRED, "g"), "tool_choice"),
        ([TOOL], ToolChoice(ToolUse.AUTO, "f"), "tool_choice"),
        ([], ToolChoice(ToolUse.REQUIRED), "tool_choice"),
    ],
)
def test_tools_are_refused(tools: list[Tool], choice: ToolChoice, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_chat(ChatPrompt((USER,), tools=tuple(tools), tool_choice=choice))
    assert raised.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        {"tools": (TOOL, Tool("g-2_X"))},
        {"tools": tuple(Tool(f"f{i}") for i in range(MAX_TOOLS))},
        {"tools": (TOOL,), "tool_choice": ToolChoice(ToolUse.REQUIRED, "f")},
        {"tool_choice": ToolChoice(ToolUse.NONE)},
    ],
)
def test_conversations_with_tools_pass(options: dict[str, Any]) -> None:
    asked = (USER, calling(CALL), Message("tool", "2", tool_call_id="c1", name="f"), USER)
    check_chat(ChatPrompt(asked, **options))


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"a": "\ud83d\ude00"}',
        r'{"a": "\\ud800"}',
        r"not JSON, so text: \ud800",
        "\\ud800[" * 2000,
        '"' + r"\ud83d\ude00" * 1000 + '"',
    ],
)
def test_arguments_of_whole_characters_pass(arguments: str) -> None:
    check_chat(ChatPrompt((USER, calling(ToolCall("c1", "f", arguments)))))
