"""Renderers, processes that render chat templates and may die of it.

A template is a program, of a model or of a client, and runs on what clients say. What it may cost
is CPU time and memory of a process of its own, which the kernel takes away with it; what comes back
is bounded here. One that rendered in time is used again.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.core.errors import BatonError, Internal, InvalidArgument, Overloaded, Unavailable
from baton.core.request.request import ChatPrompt, Message, Tool, ToolCall
from baton.tokenizer.child import Child

# A conversation and its tools as the plain values that chat templates are written for.
#
# These are the ones that `transformers` documents: OpenAI's form, but with the arguments of a call
# as an object.


_NO_PARAMETERS = {"type": "object", "properties": {}}


def chat_messages(chat: ChatPrompt) -> list[dict[str, Any]]:
    """A key is there only when its value is said, but for role and content."""
    return [_message(message) for message in chat.messages]


def chat_tools(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """None without tools: templates ask for that."""
    return [_tool(tool) for tool in chat.tools] or None


def chat_size(chat: ChatPrompt) -> int:
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


START_S = 30.0
RETRY_AFTER_S = 1.0
_CLOCK_PER_CPU = 10.0
_SLACK_S = 1.0
"""A busy machine refuses nothing that an idle one renders; but some time has to be enough."""
BASE_MEMORY_BYTES = 1 << 28
MEMORY_PER_CHARACTER = 48
"""The text, what it is made of and its messages, of four bytes a character."""
_ANSWER_PER_CHARACTER = 32
_ANSWER_BYTES = 1 << 16
OUT_OF_MEMORY = 77
"""Exit code; native code that finds no memory aborts instead."""
_CANNOT_GO_ON = (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""How a process ends that a template costs more than it may."""


class Setup(msgspec.Struct, frozen=True):
    """What a process needs to know of a template before it renders with it."""

    source: str
    special_tokens: dict[str, str] = {}
    """Text by name, as templates see them."""
    control: list[str] = []
    """Spellings of control tokens, of which those in a client's texts are to be told apart."""
    spoken: list[str] = []
    """Those of them that an assistant's own messages may hold."""
    always: bool = False
    """Whether they are told apart also where the client's texts spell none."""


class Job(msgspec.Struct):
    """One line to a process. setup: None for the one before. chat: None to try the setup only."""

    setup: Setup | None
    chat: ChatPrompt | None


class Reply(msgspec.Struct):
    """One line from a process. message: what is wrong, if anything is, and with which field."""

    text: str = ""
    own: list[tuple[int, int]] | None = None
    """See `Rendered`."""
    message: str = ""
    field: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Reply).decode


def too_much() -> InvalidArgument:
    return InvalidArgument(
        "are too much for the chat template: too many, or too long together", field="messages"
    )


@dataclass(slots=True)
class _Renderer:
    child: Child
    setup: Setup | None = None
    """What it knows."""


@dataclass
class Renderers:
    """May be used by several threads; each has a process to itself meanwhile, so there are as many
    as threads that render. cpu_s, max_characters: what one chat may use.
    """

    cpu_s: float
    max_characters: int
    _idle: list[_Renderer] = field(default_factory=list)

    def try_setup(self, setup: Setup) -> None:
        """Raises InvalidArgument (`template`) for a broken template."""
        self._ask(setup, None)

    def render(self, setup: Setup, chat: ChatPrompt) -> Reply:
        """The text and whose its control tokens are. Raises InvalidArgument naming the field at
        fault, Overloaded where the machine is too busy, or Unavailable without a process."""
        return self._ask(setup, chat)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().child.end()

    def _ask(self, setup: Setup, chat: ChatPrompt | None) -> Reply:
        renderer = self._free()
        known, renderer.setup = renderer.setup, setup
        line = _encode(Job(None if known is setup else setup, chat)) + b"\n"
        answer = renderer.child.ask(line, _SLACK_S + _CLOCK_PER_CPU * self.cpu_s)
        if answer is None:
            raise _said_by(renderer.child)
        self._idle.append(renderer)
        reply = _decode(answer)
        if reply.message:
            if reply.field == "template":  # it knows none now
                renderer.setup = None
            raise InvalidArgument(reply.message, field=reply.field)
        return reply

    def _free(self) -> _Renderer:
        while self._idle:
            renderer = self._idle.pop()
            if renderer.child.code is None:
                return renderer
            renderer.child.end()
        memory = BASE_MEMORY_BYTES + MEMORY_PER_CHARACTER * self.max_characters
        child = Child(
            "baton.tokenizer.render_process",
            *(str(self.cpu_s), str(self.max_characters), str(memory)),
            max_answer_bytes=_ANSWER_BYTES + _ANSWER_PER_CHARACTER * self.max_characters,
        )
        if child.ready(START_S):
            return _Renderer(child)
        raise Unavailable("no process that renders chat templates can be started")


def _said_by(child: Child) -> BatonError:
    """What the end of a process says of the chat that it rendered."""
    if child.code in _CANNOT_GO_ON:
        return too_much()
    if child.late or child.code == -signal.SIGKILL:  # the machine has no time or memory left
        return Overloaded("the tokenizer is too busy to render chats", retry_after_s=RETRY_AFTER_S)
    error = Internal("a chat could not be rendered")
    error.__cause__ = ChildProcessError(f"a process that renders chats ended with {child.code}")
    return error
