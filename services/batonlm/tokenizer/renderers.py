"""Renderers, which render chat templates in processes that can be killed.

A template is an untrusted program, of a model or a client, that runs on a client's texts. Its
process limits CPU time and memory; the size of the answer is limited here. A process that answered
in time is used again.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from batonlm.core.errors import BatonError, Internal, InvalidArgument, Overloaded, Unavailable
from batonlm.core.request.request import ChatPrompt, Message, Tool, ToolCall
from batonlm.core.request.validation import wrong
from batonlm.tokenizer.child import Child

_NO_PARAMETERS = {"type": "object", "properties": {}}


class MessageForm(NamedTuple):
    """What one template expects otherwise than most."""

    arguments_as_text: bool = False
    """The arguments of a call are text, as in OpenAI's form."""
    thinking: bool = False
    """Reasoning is in `thinking`, too."""


USUAL = MessageForm()


def chat_messages(chat: ChatPrompt, form: MessageForm = USUAL) -> list[dict[str, Any]]:
    """The messages as the values that `transformers` documents for templates: OpenAI's form, but
    with the arguments of a call as an object. Empty values are left out, except role and
    content."""
    return [_message(message, form) for message in chat.messages]


def chat_tools(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form; None without tools, which templates test for."""
    return [_tool(tool) for tool in chat.tools] or None


def chat_size(chat: ChatPrompt) -> int:
    """The number of characters from the client."""
    return sum(
        len(message.content)
        + len(message.reasoning)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in chat.messages
    ) + sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in chat.tools)


def _message(message: Message, form: MessageForm) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "reasoning_content": message.reasoning,
        # GPT-OSS's template refuses both with calls, and shows content as reasoning then.
        "thinking": form.thinking
        and not (message.content and message.tool_calls)
        and message.reasoning,
        "tool_calls": [_call(call, form.arguments_as_text) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {
        "role": message.role,
        "content": message.content,
        **{key: value for key, value in fields.items() if value},
    }


def _call(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if arguments_as_text else _object(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _object(text: str) -> Any:
    """The parsed JSON; the text itself when it is not JSON, because a model may have written it."""
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


RENDER_CPU_S = 0.25
"""Seconds of CPU time that a chat template may take. Those of models take milliseconds; more is an
attack by the texts of a conversation, or by a client's own template."""

START_S = 30.0
RETRY_AFTER_S = 1.0
_CLOCK_PER_CPU = 10.0
SLACK_S = 1.0
"""A chat's wall-clock limit is this plus _CLOCK_PER_CPU times the CPU time, so that a busy machine
renders the same chats as an idle one."""
BASE_MEMORY_BYTES = 1 << 28
MEMORY_PER_CHARACTER = 48
"""Room for the text, its pieces and the messages, at four bytes per character."""
_ANSWER_PER_CHARACTER = 32
_ANSWER_BYTES = 1 << 16
OUT_OF_MEMORY = 77
"""Exit code; native code without memory aborts instead."""
_CANNOT_GO_ON = (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""Return codes of a process whose template exceeded its limits."""


class Setup(msgspec.Struct, frozen=True):
    """A template and the control tokens of its tokenizer, sent to a process before rendering."""

    source: str
    special_tokens: dict[str, str] = {}
    """Text by name, as templates see them."""
    control: list[str] = []
    """Spellings of control tokens. Those in a client's texts must stay plain text."""
    spoken: list[str] = []
    """Those of `control` that an assistant's messages may contain."""
    always: bool = False
    """Whether `own` is computed even when the client's texts contain none of the spellings."""


class RenderJob(msgspec.Struct):
    """One line to a process."""

    setup: Setup | None
    """None: the same as in the job before."""
    chat: ChatPrompt | None
    """None: only compile the setup's template."""


class Reply(msgspec.Struct):
    """One line from a process."""

    text: str = ""
    own: list[tuple[int, int]] | None = None
    """See `Rendered`."""
    message: str = ""
    """What is wrong with `field`; "" on success."""
    field: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Reply).decode


def too_much() -> InvalidArgument:
    return wrong("messages", "are too much for the chat template: too many, or too long together")


@dataclass(slots=True)
class _Renderer:
    child: Child
    setup: Setup | None = None
    """The setup that the child has compiled."""


@dataclass
class Renderers:
    """Thread-safe. Each call uses a process exclusively, so that there are at most as many
    processes as threads that render."""

    cpu_s: float
    """CPU time that one chat may take."""
    max_characters: int
    """The longest text of one chat."""
    idle: list[_Renderer] = field(default_factory=list)
    """The processes that render nothing now."""

    def try_setup(self, setup: Setup) -> None:
        """Raises InvalidArgument (`template`) for a broken template. Waits longer than `render`:
        all of a machine may be starting."""
        self._ask(setup, None, START_S)

    def render(self, setup: Setup, chat: ChatPrompt) -> Reply:
        """Renders a chat. Raises InvalidArgument naming the invalid field, Overloaded when the
        machine is too busy, or Unavailable when no process can be started."""
        return self._ask(setup, chat, SLACK_S)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().child.end()

    def _ask(self, setup: Setup, chat: ChatPrompt | None, slack_s: float) -> Reply:
        renderer = self._free()
        known, renderer.setup = renderer.setup, setup
        line = _encode(RenderJob(None if known is setup else setup, chat)) + b"\n"
        answer = renderer.child.ask(line, slack_s + _CLOCK_PER_CPU * self.cpu_s)
        if answer is None:
            raise _said_by(renderer.child)
        self.idle.append(renderer)
        reply = _decode(answer)
        if reply.message:
            if reply.field == "template":  # the process has no template now
                renderer.setup = None
            raise InvalidArgument(reply.message, field=reply.field)
        return reply

    def _free(self) -> _Renderer:
        while self.idle:
            renderer = self.idle.pop()
            if renderer.child.code is None:
                return renderer
            renderer.child.end()
        memory = BASE_MEMORY_BYTES + MEMORY_PER_CHARACTER * self.max_characters
        child = Child(
            "batonlm.tokenizer.render_process",
            *(str(self.cpu_s), str(self.max_characters), str(memory)),
            max_answer_bytes=_ANSWER_BYTES + _ANSWER_PER_CHARACTER * self.max_characters,
        )
        if child.ready(START_S):
            return _Renderer(child)
        raise Unavailable("no process that renders chat templates can be started")


def _said_by(child: Child) -> BatonError:
    """The error for a chat whose process ended."""
    if child.code in _CANNOT_GO_ON:
        return too_much()
    if child.late or child.code == -signal.SIGKILL:  # the machine has no time or memory left
        return Overloaded("the tokenizer is too busy to render chats", retry_after_s=RETRY_AFTER_S)
    error = Internal("a chat could not be rendered")
    error.__cause__ = ChildProcessError(f"a process that renders chats ended with {child.code}")
    return error
