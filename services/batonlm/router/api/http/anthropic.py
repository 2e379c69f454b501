"""POST /v1/messages and /v1/messages/count_tokens, as in Anthropic's Messages API, and its form
of models.

In: a body of that API, which becomes the same core Request as one of the OpenAI routes. Out: its
answers, events of streams and errors. Fields that this API does not have are refused by name where
they would change the answer, as on the OpenAI routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import BatonError
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolUse,
)
from batonlm.core.request.validation import wrong
from batonlm.router.api.http.answers import AnswerWriter, call_arguments
from batonlm.router.api.http.json_route import JsonRoute
from batonlm.router.api.http.parse import GenerationCall, sampling_fields
from batonlm.router.api.http.responses import (
    Failure,
    Header,
    Json,
    WireFormat,
    encode,
    error_status,
    send_parts,
    utc_time,
)
from batonlm.router.api.http.schema import INSTEAD, REFUSED_ELSEWHERE, decode, no_value
from batonlm.router.api.translation import EFFORTS, Turn, in_client_words, required


class MessageText(msgspec.Struct):
    type: str
    text: str | None = None


class MessageBlock(msgspec.Struct):
    """A block of a message's content: `text`, `thinking`, `redacted_thinking`, `tool_use` or
    `tool_result`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    # of tool_use
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # of tool_result
    tool_use_id: str | None = None
    content: str | list[MessageText] | None = None


class TurnOfMessages(msgspec.Struct):
    role: str
    content: str | list[MessageBlock]


class ToolOfMessages(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.field(default_factory=no_value)


class ToolChoiceOfMessages(msgspec.Struct):
    """name: of the tool, with the type `tool`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """display: `omitted` leaves the text of thinking out of the answer."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=no_value)


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: list[TurnOfMessages]
    system: str | list[MessageText] | None = None
    tools: list[ToolOfMessages] | None = None
    tool_choice: ToolChoiceOfMessages | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages. seed: Baton's own, as on the other routes."""

    max_tokens: int
    stream: bool | None = None
    stop_strings: tuple[str, ...] | None = msgspec.field(default=None, name="stop_sequences")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


_REFUSED: Mapping[str, tuple[object, ...]] = {
    **REFUSED_ELSEWHERE,
    # What Anthropic runs on servers of its own.
    "container": (),
    "mcp_servers": ([],),
    # An earlier name.
    "output_format": (),
}
_INSTEAD: Mapping[str, str] = {
    **INSTEAD,
    "enable_thinking": "thinking",
    "format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "output_format": "output_config.format",
    "reasoning": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "think": "thinking",
}

_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive")
_TOOL_USES = {
    "auto": ToolUse.AUTO,
    "any": ToolUse.REQUIRED,
    "tool": ToolUse.REQUIRED,
    "none": ToolUse.NONE,
}
_MESSAGE_FIELD = re.compile(r"messages\[(\d+)\](.*)")
_NAMES = {
    "prompt": "messages",
    "continue_final_message": "messages",
    "stop_strings": "stop_sequences",
    "grammar": "output_config.format.schema",
    "template_kwargs": "thinking",
}


class _FieldNames(Mapping[str, str]):
    """Core's field names to the client's. One message here may be several of core's."""

    def __init__(self, origins: Sequence[str]) -> None:
        """origins: for each of core's messages the client's field that it comes from."""
        self._origins = origins

    def __getitem__(self, field: str) -> str:
        if found := _MESSAGE_FIELD.fullmatch(field):
            part = ".tool_use_id" if found[2] == ".tool_call_id" else ""
            return self._origins[int(found[1])] + part
        if field.startswith("tools["):
            return field.replace(".parameters", ".input_schema")
        return _NAMES[field]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


def parse_messages(raw: bytes) -> GenerationCall:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, MessagesBody, _REFUSED, _INSTEAD)
    prompt, names = _prompt(body)
    request = Request(
        prompt,
        model=body.model or "",
        sampling=SamplingParams(**sampling_fields(body)),
        seed=body.seed,
        max_tokens=body.max_tokens,
        # Clients of this API name the most that any of their models can write.
        cap_max_tokens=True,
        stop_strings=body.stop_strings or (),
        grammar=_grammar(body.output_config),
    )
    return GenerationCall(
        requests=(request,),
        stream=bool(body.stream),
        ignored=ignored,
        names=names,
        include_reasoning=body.thinking is None or body.thinking.display != "omitted",
    )


def _prompt(body: CountTokensBody) -> tuple[ChatPrompt, _FieldNames]:
    """Returns the conversation, and core's names of its fields to the client's."""
    conversation = _Conversation()
    if body.system:
        conversation.open("system", "system").texts.append(_text("system", body.system))
    for index, given in enumerate(body.messages):
        conversation.add(f"messages[{index}]", given)
    variables = _variables(body.thinking, body.output_config)
    turns = conversation.turns
    continues = bool(turns) and turns[-1].role == "assistant"
    if continues and turns[-1].calls:
        raise wrong(turns[-1].origin, "has a tool_use without a tool_result after it")
    prompt = ChatPrompt(
        messages=tuple(turn.message() for turn in turns),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=encode(variables).decode() if variables else "",
        tools=tuple(_tool(index, tool) for index, tool in enumerate(body.tools or ())),
        tool_choice=_tool_choice(body.tool_choice),
    )
    return prompt, _FieldNames([turn.origin for turn in turns])


class _Conversation:
    """Core's messages of a body's. Turns of one role after each other are one message, as this API
    defines it; a result of a tool is a message of its own."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._tools: dict[str, str] = {}
        """Names of called tools by the ids of their calls."""

    def open(self, origin: str, role: str) -> Turn:
        """Returns the turn to which more of this role belongs."""
        if not (self.turns and self.turns[-1].role == role in ("user", "assistant")):
            self.turns.append(Turn(role, origin))
        return self.turns[-1]

    def add(self, name: str, turn: TurnOfMessages) -> None:
        """Raises InvalidArgument naming what cannot be there."""
        if turn.role not in _ROLES:
            raise wrong(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
        where = f"{name}.content"
        if isinstance(turn.content, str):
            self.open(where, turn.role).texts.append(turn.content)
            return
        if not turn.content:
            raise wrong(where, "must not be empty")
        for index, block in enumerate(turn.content):
            self._add_block(f"{where}[{index}]", turn.role, block)

    def _add_block(self, name: str, role: str, block: MessageBlock) -> None:
        match role, block.type:
            case _, "text":
                self.open(name, role).texts.append(required(f"{name}.text", block.text))
            case "assistant", "thinking":
                thought = required(f"{name}.thinking", block.thinking)
                self.open(name, role).thoughts.append(thought)
            case "assistant", "redacted_thinking":
                # Only Anthropic can read it.
                pass
            case "assistant", "tool_use":
                call = ToolCall(
                    required(f"{name}.id", block.id),
                    required(f"{name}.name", block.name),
                    encode(required(f"{name}.input", block.input)).decode(),
                )
                self._tools[call.id] = call.name
                self.open(name, role).calls.append(call)
            case "user", "tool_result":
                call_id = required(f"{name}.tool_use_id", block.tool_use_id)
                if call_id not in self._tools:
                    raise wrong(f"{name}.tool_use_id", "must be the id of a tool_use before it")
                text = _text(f"{name}.content", block.content or "")
                self.turns.append(Turn("tool", name, call_id, self._tools[call_id], [text]))
            case _:
                own = {"user": " or tool_result", "assistant": ", thinking or tool_use"}
                raise wrong(f"{name}.type", f"must be text{own.get(role, '')} in a {role} message")


def _text(name: str, content: str | list[MessageText]) -> str:
    """Returns the text of blocks, each on lines of its own."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            raise wrong(f"{name}[{index}].type", "must be text")
    return "\n".join(
        required(f"{name}[{index}].text", block.text) for index, block in enumerate(content)
    )


def _tool(index: int, tool: ToolOfMessages) -> Tool:
    if tool.type not in (None, "custom"):
        raise wrong(f"tools[{index}].type", "must be custom: Baton runs no tools itself")
    schema = bytes(tool.input_schema).decode()
    if schema == "null":
        raise wrong(f"tools[{index}].input_schema", "is required")
    return Tool(tool.name, tool.description or "", schema)


def _tool_choice(given: ToolChoiceOfMessages | None) -> ToolChoice:
    if given is None:
        return ToolChoice()
    if given.type not in _TOOL_USES:
        raise wrong("tool_choice.type", f"must be one of {', '.join(_TOOL_USES)}")
    if (given.type == "tool") != bool(given.name):
        raise wrong("tool_choice.name", "must be there with the type tool, and only then")
    return ToolChoice(
        _TOOL_USES[given.type], given.name or "", parallel=not given.disable_parallel_tool_use
    )


def _variables(thinking: ThinkingConfig | None, config: OutputConfig | None) -> Json:
    """Returns the variables of the chat template that the client sets. A template may lack them:
    clients of this API send them whatever the model is."""
    found: Json = {}
    if thinking is not None:
        if thinking.type not in _THINKING:
            raise wrong("thinking.type", f"must be one of {', '.join(_THINKING)}")
        if thinking.display not in (None, "summarized", "omitted"):
            raise wrong("thinking.display", "must be summarized or omitted")
        if thinking.type != "adaptive":
            found["enable_thinking"] = thinking.type == "enabled"
        if thinking.type == "enabled":
            if required("thinking.budget_tokens", thinking.budget_tokens) < 1:
                raise wrong("thinking.budget_tokens", "must be at least 1")
            found["thinking_budget"] = thinking.budget_tokens
    if config is not None and config.effort is not None:
        if config.effort not in EFFORTS:
            raise wrong("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
        found["reasoning_effort"] = EFFORTS[config.effort]
    return found


def _grammar(config: OutputConfig | None) -> Grammar | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise wrong("output_config.format.type", "must be json_schema")
    text = bytes(config.format.schema).decode()
    if not text.startswith("{"):
        raise wrong("output_config.format.schema", "must be an object")
    return Grammar(GrammarKind.JSON_SCHEMA, text)


class CountTokens(JsonRoute[CountTokensBody]):
    """Answers with the number of tokens of a conversation's prompt."""

    def request(self, given: CountTokensBody) -> Request:
        prompt, _ = _prompt(given)
        return Request(prompt, model=given.model or "")

    async def respond(
        self,
        given: CountTokensBody,
        request: Request,
        holding: Holding,
        headers: list[Header],
        send: Send,
    ) -> None:
        try:
            encoded, _ = await self.pipeline.tokenize(request, holding)
        except BatonError as error:
            raise in_client_words(error, _prompt(given)[1]) from error
        await send_parts(send, [encode({"input_tokens": len(encoded.token_ids)})], headers)


VERSION_HEADER = b"anthropic-version"
"""All clients of this API send it."""


def models_document(models: Mapping[str, Json]) -> Json:
    """Returns the list of models of this API. models: those of the OpenAI route, by their names."""
    data = [model_document(model) for model in models.values()]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_document(model: Json) -> Json:
    """model: see `models_document`."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": utc_time(model["created"]),
    }


SIGNATURE = "baton"
"""Of all thinking. Clients send back only thinking that has a signature; nobody verifies it."""


class MessagesAnswer(AnswerWriter):
    """The answer of POST /v1/messages: a message whose blocks are thinking, text and calls."""

    id_prefix = "msg"

    def __init__(self, call: GenerationCall, accepted: Sequence[Accepted], created: int) -> None:
        super().__init__(call, accepted, created)
        self._id = f"{self.id_prefix}_{call.stream_id(accepted[0])}"
        self._place = 0
        """Of the block that is open, or of the next one."""
        self._open: tuple[str, int] | None = None
        """The kind of the block that is open, and the number of its call."""
        self._called = False
        """Whether the answer has calls."""
        self._end: Json = {}
        """Why the answer ended, once it has."""

    @property
    def has_plain_chunks(self) -> bool:
        return False

    def opening(self, prompt: int) -> list[Json]:
        usage = {"input_tokens": self._accepted[0].prompt_tokens, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return [{"type": "message_start", "message": message}]

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        found: list[Json] = []
        calls = list(delta.tool_calls)
        if calls and self._open == ("tool_use", calls[0].index):
            # The text of this delta follows the end of this call.
            found += self._part_of_call(calls.pop(0))
        if delta.reasoning:
            found += self._begin("thinking", 0, {"thinking": "", "signature": ""})
            if self._call.include_reasoning:
                found.append(self._more("thinking_delta", "thinking", delta.reasoning))
        if delta.text:
            found += self._begin("text", 0, {"text": ""})
            found.append(self._more("text_delta", "text", delta.text))
        for call in calls:
            found += self._part_of_call(call)
        if delta.finish_reason is not None:
            found += self._close()
            self._end = self._ended(delta)
        return found

    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        ((delta,),) = whole
        self._called = bool(delta.tool_calls)
        blocks: list[Json] = []
        if delta.reasoning:
            shown = delta.reasoning if self._call.include_reasoning else ""
            blocks.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE})
        if delta.text:
            blocks.append({"type": "text", "text": delta.text})
        blocks += map(_tool_use, delta.tool_calls)
        return self._message(blocks, self._ended(delta), self._usage_now())

    def last_chunk(self, *, with_timings: bool) -> list[Json]:
        last = {"type": "message_delta", "delta": self._end, "usage": self._usage_now()}
        return [last | (self.timings() if with_timings else {}), {"type": "message_stop"}]

    def _message(self, blocks: list[Json], ending: Json, usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._accepted[0].model,
            "content": blocks,
            **ending,
            "usage": usage,
        }

    def _begin(self, kind: str, number: int, block: Json) -> list[Json]:
        """Opens a block, unless it is open, and closes the one before."""
        if self._open == (kind, number):
            return []
        found = self._close()
        self._open = kind, number
        block = {"type": kind, **block}
        return [
            *found,
            {"type": "content_block_start", "index": self._place, "content_block": block},
        ]

    def _part_of_call(self, call: ToolCallDelta) -> list[Json]:
        self._called = True
        found = self._begin("tool_use", call.index, {"id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            found.append(self._more("input_json_delta", "partial_json", call.arguments))
        return found

    def _more(self, kind: str, field: str, text: str) -> Json:
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._place, "delta": delta}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        found = []
        if self._open[0] == "thinking":
            found.append(self._more("signature_delta", "signature", SIGNATURE))
        found.append({"type": "content_block_stop", "index": self._place})
        self._open = None
        self._place += 1
        return found

    def _ended(self, delta: Delta) -> Json:
        """Returns why the answer ended. All its tokens are counted."""
        reason, most = "end_turn", self._call.requests[0].max_tokens or 0
        if delta.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens" if self._sampled >= most else "model_context_window_exceeded"
        elif delta.stop_string is not None:
            reason = "stop_sequence"
        elif self._called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": delta.stop_string}

    def _usage_now(self) -> Json:
        """Returns the usage of a request that has finished. Tokens that were read from a cache are
        not among its input_tokens."""
        (end,) = self._finished.values()
        usage = {
            "input_tokens": end.prompt_tokens - end.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": end.cached_tokens,
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"thinking_tokens": end.reasoning_tokens},
        }
        return usage | ({"tried_tokens": end.tried_tokens} if end.tried_tokens else {})


def _tool_use(call: ToolCallDelta) -> Json:
    arguments = call_arguments(call)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _failure(error: Failure, request_id: str) -> Json:
    status = error_status(error)
    default = "invalid_request_error" if status < 500 else "api_error"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(status, default), "message": error.message},
        "request_id": request_id or None,
    }


ANTHROPIC = WireFormat(
    content_type=b"text/event-stream; charset=utf-8",
    frame=lambda event: b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)),
    end=b"",
    keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n',
    failure=_failure,
    id_header=b"request-id",
)
