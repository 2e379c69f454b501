"""Tools and calls in OpenAI's words: bodies to core values, and parts of an answer back to JSON."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import InvalidArgument
from baton.core.request.request import Delta, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolUse
from baton.router.api.http.respond import Json
from baton.router.api.http.schema import CallOfTool, Function, NamedTool, ToolOfBody

_USES = {"none": ToolUse.NONE, "auto": ToolUse.AUTO, "required": ToolUse.REQUIRED}


def tools_of(tools: Sequence[ToolOfBody] | None) -> tuple[Tool, ...]:
    """Raises InvalidArgument for a tool that is no function."""
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            name = f"tools[{index}].type"
            raise InvalidArgument(f"{name} must be function", field=name)
    return tuple(_tool(tool.function) for tool in tools or ())


def choice_of(choice: str | NamedTool | None, parallel: bool | None) -> ToolChoice:
    """Raises InvalidArgument for a choice that is not offered."""
    several = True if parallel is None else parallel
    if choice is None:
        return ToolChoice(parallel=several)
    if isinstance(choice, NamedTool):
        if choice.type != "function" or choice.function is None or not choice.function.name:
            raise InvalidArgument("tool_choice must name a function", field="tool_choice")
        return ToolChoice(ToolUse.REQUIRED, choice.function.name, several)
    if choice not in _USES:
        raise InvalidArgument(
            f"tool_choice must be {', '.join(_USES)} or name a function", field="tool_choice"
        )
    return ToolChoice(_USES[choice], parallel=several)


def calls_of(calls: Sequence[CallOfTool] | None) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.id, call.function.name, call.function.arguments) for call in calls or ()
    )


def said(delta: Delta, *, reasoning: bool) -> Json:
    """What a chunk's delta says. reasoning: whether that is told, under both names it goes by."""
    new: Json = {}
    if delta.reasoning and reasoning:
        new["reasoning"] = new["reasoning_content"] = delta.reasoning
    if delta.text:
        new["content"] = delta.text
    if delta.tool_calls:
        new["tool_calls"] = [_more(call) for call in delta.tool_calls]
    return new


def message(delta: Delta, *, reasoning: bool) -> Json:
    """A whole answer. Its content is null when it is nothing but calls."""
    content = None if delta.tool_calls and not delta.text else delta.text
    new: Json = {"role": "assistant", "content": content, "refusal": None}
    if delta.reasoning and reasoning:
        new["reasoning"] = new["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        new["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.tool_calls
        ]
    return new


def joined(parts: Sequence[Delta]) -> tuple[ToolCallDelta, ...]:
    """The calls of a choice, whole."""
    begun: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        begun.setdefault(call.index, call)
        arguments.setdefault(call.index, []).append(call.arguments)
    return tuple(
        ToolCallDelta(index, call.id, call.name, "".join(arguments[index]))
        for index, call in begun.items()
    )


def _tool(function: Function) -> Tool:
    parameters = bytes(function.parameters).decode()
    return Tool(
        function.name,
        function.description or "",
        "" if parameters == "null" else parameters,
    )


def _more(call: ToolCallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
