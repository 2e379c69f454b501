"""The check of a conversation and its tools. Field names are those of ChatPrompt and its parts."""

from __future__ import annotations

import json
import re
from typing import Any

from baton.core.request.checks import check_json_text, check_length, check_text, wrong
from baton.core.request.request import ChatPrompt, Message, Tool, ToolChoice, ToolUse
from baton.core.request.template_kwargs import parse_template_kwargs

MAX_CHAT_BYTES = 1 << 20
MAX_MESSAGES = 2048
MAX_CALLS_PER_MESSAGE = 128
MAX_CHAT_TEMPLATE_BYTES = 1 << 16
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 1 << 16
MAX_SCHEMA_DEPTH = 32
MAX_NAME_BYTES = 256

ROLES = ("system", "user", "assistant", "tool")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_chat(chat: ChatPrompt) -> None:
    """Raises InvalidArgument naming the first field at fault."""
    if not chat.messages:
        raise wrong("messages", "must not be empty")
    check_length("messages", chat.messages, MAX_MESSAGES, "messages")
    room = MAX_CHAT_BYTES
    for index, message in enumerate(chat.messages):
        room -= _check_message(f"messages[{index}]", message)
        if room < 0:
            raise wrong("messages", f"must have at most {MAX_CHAT_BYTES} bytes of content")
    check_text("template", chat.template, MAX_CHAT_TEMPLATE_BYTES)
    parse_template_kwargs(chat.template_kwargs)
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise wrong(
                "continue_final_message", "cannot be combined with add_generation_prompt = true"
            )
        if chat.messages[-1].role != "assistant":
            raise wrong("continue_final_message", "needs a last message of role assistant")
    check_length("tools", chat.tools, MAX_TOOLS, "tools")
    for index, tool in enumerate(chat.tools):
        room -= _check_tool(f"tools[{index}]", tool)
        if room < 0:
            raise wrong("tools", f"and messages must have at most {MAX_CHAT_BYTES} bytes")
    names = [tool.name for tool in chat.tools]
    if len(set(names)) < len(names):
        raise wrong("tools", "must not have two of one name")
    _check_choice(chat.tool_choice, names)


def _check_message(field: str, message: Message) -> int:
    """Bytes that the message has."""
    if message.role not in ROLES:
        raise wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    size = check_text(f"{field}.content", message.content, MAX_CHAT_BYTES)
    if not (message.tool_calls or message.tool_call_id or message.name or message.reasoning):
        if message.role == "tool":
            raise wrong(f"{field}.tool_call_id", "is required in a message of role tool")
        return size
    size += check_text(f"{field}.name", message.name, MAX_NAME_BYTES)
    size += check_text(f"{field}.reasoning", message.reasoning, MAX_CHAT_BYTES)
    size += check_text(f"{field}.tool_call_id", message.tool_call_id, MAX_NAME_BYTES)
    if (message.role == "tool") != bool(message.tool_call_id):
        raise wrong(f"{field}.tool_call_id", "must be in messages of role tool, and only there")
    if message.role != "assistant" and (message.tool_calls or message.reasoning):
        said = "tool_calls" if message.tool_calls else "reasoning"
        raise wrong(f"{field}.{said}", "must be in messages of role assistant only")
    return size + _check_calls(f"{field}.tool_calls", message)


def _check_calls(field: str, message: Message) -> int:
    check_length(field, message.tool_calls, MAX_CALLS_PER_MESSAGE, "calls")
    size = 0
    for index, call in enumerate(message.tool_calls):
        where = f"{field}[{index}]"
        if not call.id:
            raise wrong(f"{where}.id", "must not be empty")
        if not call.name:
            raise wrong(f"{where}.name", "must not be empty")
        size += check_text(f"{where}.id", call.id, MAX_NAME_BYTES)
        size += check_text(f"{where}.name", call.name, MAX_NAME_BYTES)
        size += check_text(f"{where}.arguments", call.arguments, MAX_CHAT_BYTES)
        check_json_text(f"{where}.arguments", call.arguments)
    return size


def _check_tool(field: str, tool: Tool) -> int:
    if not _NAME.fullmatch(tool.name):
        raise wrong(f"{field}.name", "must be 1 to 64 letters, digits, _ or -")
    size = check_text(f"{field}.description", tool.description, MAX_CHAT_BYTES)
    size += check_text(f"{field}.parameters", tool.parameters, MAX_SCHEMA_BYTES)
    if tool.parameters:
        check_json_text(f"{field}.parameters", tool.parameters)
        _check_schema(f"{field}.parameters", tool.parameters)
    return len(tool.name) + size


def _check_schema(field: str, text: str) -> None:
    """Only that it can be a schema of an object; whoever compiles it knows the rest."""
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise wrong(field, "must be JSON") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise wrong(field, "must be the JSON schema of an object")
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong(field, "must have an object as properties")
    if not isinstance(schema.get("required", []), list):
        raise wrong(field, "must have a list as required")
    if not _is_flat(schema, MAX_SCHEMA_DEPTH):
        raise wrong(field, f"must be nested at most {MAX_SCHEMA_DEPTH} deep")


def _no_number(constant: str) -> Any:
    raise ValueError(constant)


def _is_flat(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not parts or (depth > 0 and all(_is_flat(part, depth - 1) for part in parts))


def _check_choice(choice: ToolChoice, names: list[str]) -> None:
    if choice.name and choice.use is not ToolUse.REQUIRED:
        raise wrong("tool_choice", "can name a tool only where a call is required")
    if choice.name and choice.name not in names:
        raise wrong("tool_choice", "must name one of tools")
    if choice.use is ToolUse.REQUIRED and not names:
        raise wrong("tool_choice", "cannot require a call without tools")
