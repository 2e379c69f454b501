"""A conversation and its tools as the plain values that chat templates are written for.

These are the ones that `transformers` documents: OpenAI's form, but with the arguments of a call as
an object.
"""

from __future__ import annotations

import json
from typing import Any

from baton.core.request.request import ChatPrompt, Message, Tool, ToolCall

_NO_PARAMETERS = {"type": "object", "properties": {}}


def messages(chat: ChatPrompt) -> list[dict[str, Any]]:
    """A key is there only when its value is said, but for role and content."""
    return [_message(message) for message in chat.messages]


def tools(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """None without tools: templates ask for that."""
    return [_tool(tool) for tool in chat.tools] or None


def size(chat: ChatPrompt) -> int:
    """Characters that come from the client."""
    return sum(
        len(message.content)
        + len(message.reasoning)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    ) + sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in chat.tools)


def _message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {
        "reasoning_content": message.reasoning,
        "tool_calls": [_call(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {
        "role": message.role,
        "content": message.content,
        **{key: value for key, value in said.items() if value},
    }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _object(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _object(text: str) -> Any:
    """The value that a text is the JSON of; else the text, which is what a model once wrote."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _object(tool.parameters) if tool.parameters else _NO_PARAMETERS
    return {"type": "function", "function": function}
