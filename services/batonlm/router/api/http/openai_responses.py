"""The bodies and answers of /v1/responses, as in OpenAI's Responses API.

In: a body of that API, and the items of what it continues, which become the same core Request as a
chat of the other routes. Out: its documents and events. `response_routes` has the routes, and what
is stored.

What OpenAI runs on servers of its own (`conversation`, tools such as `web_search`) is refused by
name.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    InvalidArgument,
    Overloaded,
)
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    TokenLogprobs,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolUse,
)
from batonlm.core.request.validation import MAX_MESSAGES, wrong
from batonlm.router.api.http.answers import AnswerWriter, token_logprobs
from batonlm.router.api.http.parse import TOOL_USES, GenerationCall, json_schema, sampling_fields
from batonlm.router.api.http.responses import (
    Json,
    WireFormat,
    encode,
    error_document,
)
from batonlm.router.api.http.schema import INSTEAD, REFUSED_ELSEWHERE, decode, no_value
from batonlm.router.api.translation import ANY_OBJECT, Turn, required


class ResponsesPart(msgspec.Struct):
    """A part of a content: `input_text`, `output_text`, `refusal`, `reasoning_text` or
    `summary_text`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponsesItem(msgspec.Struct):
    """An item of the input: `message`, `function_call`, `function_call_output`, `reasoning` or
    `item_reference`."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    # of a message
    role: str | None = None
    content: str | list[ResponsesPart] | None = None
    # of a call and its output
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsesPart] | None = None
    # of reasoning
    summary: list[ResponsesPart] | None = None
    encrypted_content: str | None = None


class ResponsesTool(msgspec.Struct):
    """strict has no effect: calls that are forced always follow their schema."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=no_value)
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct):
    """Of the type `function` with a name, or `allowed_tools` with a mode and tools."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ResponsesTool] | None = None


class ResponsesFormat(msgspec.Struct):
    """name, description and strict have no effect: an answer always follows the schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_value)
    strict: bool | None = None


class ResponsesText(msgspec.Struct):
    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesReasoning(msgspec.Struct):
    """summary: the reasoning is written as its summary; any value means the same."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses. seed, top_k, min_p: Baton's own, as on the other routes."""

    model: str | None = None
    input: str | list[ResponsesItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    max_tokens: int | None = msgspec.field(default=None, name="max_output_tokens")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None


_REFUSED: Mapping[str, tuple[object, ...]] = {
    **REFUSED_ELSEWHERE,
    # What OpenAI runs on servers of its own.
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
}
_INSTEAD: Mapping[str, str] = {
    **INSTEAD,
    "conversation": "previous_response_id",
    "documents": "input",
    "enable_thinking": "reasoning.effort",
    "format": "text.format",
    "function_call": "tool_choice",
    "logprobs": "include with message.output_text.logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_length": "max_output_tokens",
    "messages": "input",
    "num_predict": "max_output_tokens",
    "prompt": "instructions",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "system": "instructions",
    "think": "reasoning.effort",
    "thinking": "reasoning.effort",
    "verbosity": "text.verbosity",
}
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDES = frozenset(
    {
        LOGPROBS,
        ENCRYPTED,
        # Of what is never in a response of Baton's.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TRUNCATIONS = ("auto", "disabled")
MAX_ITEMS = 2 * MAX_MESSAGES
"""Of an input. Core bounds the messages that they become, and several may be one."""
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Pairs of metadata, and letters of each, as OpenAI has them."""
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "grammar": "text.format.schema",
    "template_kwargs": "reasoning",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}


class _FieldNames(dict[str, str]):
    """Core's field names to the client's. Several items may be one of core's messages."""

    def __init__(self, origins: Sequence[str]) -> None:
        """origins: for each of core's messages the client's field that it comes from."""
        super().__init__(_NAMES)
        for index, origin in enumerate(origins):
            self[f"messages[{index}]"] = origin

    def get(self, field: str, default: Any = None) -> Any:
        if field.startswith("messages["):
            message, bracket, part = field.partition("]")
            part = ".call_id" if part == ".tool_call_id" else ""
            return self[message + bracket] + part
        return super().get(field, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(GenerationCall):
    """A call of POST /v1/responses."""

    body: ResponsesBody
    items: tuple[Json, ...]
    """Of its own input."""
    created: int
    """In seconds since 1970."""
    starting_after: int = -1
    """The number of the last event that is not sent."""
    begun: bool = False
    """Whether it is in the background and reads what runs there."""

    @property
    def stores(self) -> bool:
        return self.body.store is not False

    @property
    def background(self) -> bool:
        return bool(self.body.background)

    def includes(self, what: str) -> bool:
        return what in (self.body.include or ())

    @property
    def summarises(self) -> bool:
        """Whether reasoning is written as its summary."""
        asked = self.body.reasoning
        return asked is not None and bool(asked.summary or asked.generate_summary)


def read_body(raw: bytes) -> tuple[ResponsesBody, tuple[str, ...]]:
    """Returns also the names of parameters without effect. Raises InvalidArgument."""
    return decode(raw, ResponsesBody, _REFUSED, _INSTEAD)


def responses_call(
    body: ResponsesBody, ignored: tuple[str, ...], before: Iterable[Json], own: Sequence[Json]
) -> ResponsesCall:
    """before, own: the items of earlier responses, and those of this one's input. Raises
    InvalidArgument naming the field."""
    _check(body)
    conversation = _Conversation()
    for item in before:
        conversation.add("previous_response_id", item)
    for index, item in enumerate(own):
        conversation.add(f"input[{index}]" if isinstance(body.input, list) else "input", item)
    turns = conversation.turns
    if body.instructions:
        if turns and turns[0].role == "system":
            turns[0].texts.insert(0, body.instructions)
        else:
            turns.insert(0, Turn("system", "instructions", texts=[body.instructions]))
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    choice, allowed = _tool_choice(body)
    grammar = _grammar(body.text)
    kwargs = _template_kwargs(body.reasoning)
    prompt = ChatPrompt(
        messages=tuple(turn.message() for turn in turns),
        tools=tuple(tool for tool in tools if allowed is None or tool.name in allowed),
        tool_choice=choice,
        template_kwargs=encode(kwargs).decode() if kwargs else "",
        needed_variables=tuple(kwargs),
    )
    sampling = sampling_fields(body)
    if LOGPROBS in (body.include or ()):
        sampling.setdefault("top_logprobs", 0)
    request = Request(
        prompt,
        model=body.model or "",
        sampling=SamplingParams(**sampling),
        seed=body.seed,
        max_tokens=body.max_tokens,
        # The name says that it is a bound.
        cap_max_tokens=True,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        # The format is that of a text, which there is not beside calls that must be made.
        grammar=None if choice.use is ToolUse.REQUIRED else grammar,
    )
    return ResponsesCall(
        requests=(request,),
        stream=bool(body.stream),
        ignored=ignored,
        names=_FieldNames([turn.origin for turn in turns]),
        body=body,
        items=tuple(own),
        created=int(time.time()),
    )


def _check(body: ResponsesBody) -> None:
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise wrong(f"include[{index}]", f"must be one of {', '.join(sorted(_INCLUDES))}")
    if body.truncation not in (None, *_TRUNCATIONS):
        raise wrong("truncation", f"must be one of {', '.join(_TRUNCATIONS)}")
    if body.background and body.store is False:
        raise InvalidArgument("background needs store = true", field="background")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise wrong("text.verbosity", "is not supported here, other than medium")
    pairs = body.metadata or {}
    if len(pairs) > MAX_METADATA or any(
        len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in pairs.items()
    ):
        raise wrong(
            "metadata",
            f"must have at most {MAX_METADATA} pairs, of {MAX_KEY} and {MAX_VALUE} letters",
        )


def _template_kwargs(asked: ResponsesReasoning | None) -> Json:
    if asked is None or asked.effort is None:
        return {}
    return (
        {"enable_thinking": False} if asked.effort == "none" else {"reasoning_effort": asked.effort}
    )


def _grammar(text: ResponsesText | None) -> Grammar | None:
    asked = text.format if text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return ANY_OBJECT
    if asked.type != "json_schema":
        raise wrong("text.format.type", "must be one of text, json_object, json_schema")
    grammar = json_schema(asked.schema, "text.format.schema")
    if grammar is None:
        raise wrong("text.format.schema", "is required")
    return grammar


def _tool(index: int, tool: ResponsesTool) -> Tool:
    where = f"tools[{index}]"
    if tool.type != "function":
        raise wrong(f"{where}.type", "must be function: Baton runs no tools itself")
    parameters = bytes(tool.parameters).decode()
    return Tool(
        required(f"{where}.name", tool.name),
        tool.description or "",
        "" if parameters == "null" else parameters,
    )


def _tool_choice(body: ResponsesBody) -> tuple[ToolChoice, set[str] | None]:
    """Returns also the names of the tools that may be called; None: all."""
    parallel, given = body.parallel_tool_calls is not False, body.tool_choice
    if given is None:
        return ToolChoice(parallel=parallel), None
    if isinstance(given, str):
        if given not in TOOL_USES:
            raise wrong("tool_choice", f"must be {', '.join(TOOL_USES)} or name a function")
        return ToolChoice(TOOL_USES[given], parallel=parallel), None
    if given.type == "function":
        name = required("tool_choice.name", given.name)
        return ToolChoice(ToolUse.REQUIRED, name, parallel), None
    if given.type != "allowed_tools":
        raise wrong("tool_choice.type", "must be function or allowed_tools")
    if given.mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", "must be auto or required")
    known, allowed = {tool.name for tool in body.tools or ()}, set()
    for index, tool in enumerate(given.tools or ()):
        where = f"tool_choice.tools[{index}]"
        if tool.type != "function" or tool.name not in known:
            raise wrong(where, "must be a function of tools")
        allowed.add(tool.name or "")
    return ToolChoice(TOOL_USES[given.mode], parallel=parallel), allowed


# Items: in the form in which they are stored, listed, and part of a response.


def input_items(given: str | list[ResponsesItem] | None) -> list[Json]:
    """Returns the items of an input. Raises InvalidArgument naming the field."""
    if given is None or given == []:
        raise wrong("input", "is required")
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    if len(given) > MAX_ITEMS:
        raise wrong("input", f"must have at most {MAX_ITEMS} items")
    return [_item(f"input[{index}]", item) for index, item in enumerate(given)]


def _message(role: str, content: list[Json]) -> Json:
    return {"type": "message", "role": role, "content": content, "status": "completed"}


def _item(where: str, given: ResponsesItem) -> Json:
    kind = given.type or ("message" if given.role else "item_reference")
    made: Json
    match kind:
        case "message":
            role = required(f"{where}.role", given.role)
            if role not in _ROLES:
                raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
            text = {"type": "output_text", "annotations": []}
            if role != "assistant":
                text = {"type": "input_text"}
            texts = _texts(f"{where}.content", given.content)
            made = _message(role, [text | {"text": part} for part in texts])
        case "function_call":
            made = {
                "type": kind,
                "call_id": required(f"{where}.call_id", given.call_id),
                "name": required(f"{where}.name", given.name),
                "arguments": required(f"{where}.arguments", given.arguments),
                "status": given.status or "completed",
            }
        case "function_call_output":
            texts = _texts(f"{where}.output", given.output)
            made = {
                "type": kind,
                "call_id": required(f"{where}.call_id", given.call_id),
                "output": "".join(texts),
                "status": "completed",
            }
        case "reasoning":
            made = {"type": kind, "summary": [], "content": []}
            for name, part in (("summary", "summary_text"), ("content", "reasoning_text")):
                texts = _texts(f"{where}.{name}", getattr(given, name) or [])
                made[name] = [{"type": part, "text": text} for text in texts]
            if given.encrypted_content:
                made["encrypted_content"] = given.encrypted_content
        case "item_reference":
            made = {"type": kind, "id": required(f"{where}.id", given.id)}
        case _:
            raise wrong(
                f"{where}.type",
                "must be one of message, function_call, function_call_output, reasoning, "
                "item_reference",
            )
    return {"id": given.id, **made} if given.id else made


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _texts(name: str, content: str | list[ResponsesPart] | None) -> list[str]:
    if content is None:
        raise wrong(name, "is required")
    if isinstance(content, str):
        return [content]
    found = []
    for index, part in enumerate(content):
        where = f"{name}[{index}]"
        if part.type == "refusal":
            found.append(required(f"{where}.refusal", part.refusal))
        elif part.type in _TEXTS:
            found.append(required(f"{where}.text", part.text))
        else:
            raise wrong(f"{where}.type", "must be that of a text: no model here reads other parts")
    return found


def named_items(call: ResponsesCall, response_id: str) -> list[Json]:
    """Returns the items of a call's own input, all with ids."""
    stream_id = response_id.partition("_")[2]
    return [
        {"id": f"{_PREFIXES[item['type']]}_{stream_id}_in{index}", **item}
        for index, item in enumerate(call.items)
    ]


def response_of_item(item_id: str) -> str:
    """Returns the id of the response that an item with an id of Baton's belongs to."""
    stream_id = item_id.partition("_")[2].partition("_")[0]
    return f"{ResponsesAnswer.id_prefix}_{stream_id}"


class _Conversation:
    """Core's messages of items. Reasoning, text and calls of one turn of the assistant are one
    message, as templates have it; an output of a call is one of its own."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._tools: dict[str, str] = {}
        """Names of called functions by the ids of their calls."""

    def add(self, origin: str, item: Json) -> None:
        """Raises InvalidArgument naming what cannot be there."""
        match item["type"]:
            case "message":
                role = _ROLES[item["role"]]
                text = "".join(part["text"] for part in item["content"])
                if role == "assistant":
                    self._assistant(origin).texts.append(text)
                elif role == "system" and all(turn.role == "system" for turn in self.turns[-1:]):
                    # At the beginning many templates take one such message only.
                    self._system(origin).texts.append(text)
                else:
                    self.turns.append(Turn(role, origin, texts=[text]))
            case "reasoning":
                self._assistant(origin).thoughts.append(_thoughts(origin, item))
            case "function_call":
                if item["status"] == "incomplete":
                    # Its arguments were cut.
                    return
                call = ToolCall(item["call_id"], item["name"], item["arguments"])
                self._tools[call.id] = call.name
                turns = self.turns
                turn = turns[-1] if turns and turns[-1].role == "assistant" else None
                (turn or self._assistant(origin)).calls.append(call)
            case "function_call_output":
                call_id = item["call_id"]
                if call_id not in self._tools:
                    raise wrong(f"{origin}.call_id", "must be that of a function_call before it")
                turn = Turn("tool", origin, call_id, self._tools[call_id], [item["output"]])
                self.turns.append(turn)

    def _system(self, origin: str) -> Turn:
        if not self.turns:
            self.turns.append(Turn("system", origin))
        return self.turns[-1]

    def _assistant(self, origin: str) -> Turn:
        """Returns the turn to which more text or reasoning belongs: another text begins a turn,
        unless calls without output are between them."""
        turns = self.turns
        if not (
            turns and turns[-1].role == "assistant" and (turns[-1].calls or not turns[-1].texts)
        ):
            turns.append(Turn("assistant", origin))
        return turns[-1]


def _thoughts(origin: str, item: Json) -> str:
    texts = [part["text"] for part in item["content"] or item["summary"]]
    if not texts and item.get("encrypted_content"):
        try:
            return base64.b64decode(item["encrypted_content"], validate=True).decode()
        except (binascii.Error, ValueError):
            raise wrong(f"{origin}.encrypted_content", "is none of Baton's") from None
    return "".join(texts)


@dataclass(slots=True)
class _OpenItem:
    """The item of the output that grows."""

    kind: str
    call: int
    """The number of the call, of a `function_call`."""
    head: Json
    """Its fields without status and content."""
    index: int
    """In the output."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)


_PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
}
"""Of the ids of items, by their types. The id of the response follows, then the item's place."""


class ResponsesAnswer(AnswerWriter):
    """The answer of POST /v1/responses: items, which are built event by event, streamed or not."""

    id_prefix = "resp"

    def __init__(self, call: GenerationCall, accepted: Sequence[Accepted], created: int) -> None:
        super().__init__(call, accepted, created)
        assert isinstance(call, ResponsesCall)
        self._asked = call
        self._stream_id = call.stream_id(accepted[0])
        self.id = self._id = f"{self.id_prefix}_{self._stream_id}"
        self._next_number = 0
        """Of the next event."""
        self._output: list[Json] = []
        self._growing: _OpenItem | None = None
        self._new: list[Json] = []
        """The events of the newest delta."""
        self._logprobs: list[TokenLogprobs] = []
        """Of tokens whose text comes later."""
        self._end: Json = {"status": "in_progress"}

    @property
    def has_plain_chunks(self) -> bool:
        return False

    def opening(self, prompt: int) -> list[Json]:
        begun = self.whole()
        events = [
            self._event("created", response=begun),
            self._event("in_progress", response=begun),
        ]
        return self._unseen(events)

    def count(self, prompt: int, event: Event) -> None:
        super().count(prompt, event)
        if isinstance(event, Delta):
            self._new = self._add(event)

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        return self._unseen(self._new)

    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        return self.whole()

    def last_chunk(self, *, with_timings: bool) -> list[Json]:
        whole = self.whole()
        last = self._event(whole["status"], response=whole)
        last["response"] |= self.timings() if with_timings else {}
        return self._unseen([last])

    def failure(self, error: BatonError) -> Json:
        return self._event("failed", response=self.failed(error))

    def failed(self, error: BatonError) -> Json:
        """Returns the document of a response that ended so."""
        self._close("incomplete")
        if isinstance(error, Cancelled):
            self._end = {"status": "cancelled"}
        else:
            self._end = {"status": "failed", "error": _error(error)}
        return self.whole()

    def whole(self) -> Json:
        """Returns the document of the response as it is now."""
        body = self._asked.body
        text, reasoning = body.text or ResponsesText(), body.reasoning or ResponsesReasoning()
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._asked.created,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **self._end,
            "background": self._asked.background,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._accepted[0].model,
            "output": [*self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort,
                "summary": reasoning.summary or reasoning.generate_summary,
            },
            "store": self._asked.stores,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {
                "format": _shown(text.format or ResponsesFormat("text")),
                "verbosity": "medium",
            },
            "tool_choice": choice if isinstance(choice, str) else _shown(choice),
            "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage_now(),
            "user": None,
        }

    def _usage_now(self) -> Json | None:
        end = self._finished.get(0)
        if end is None:
            return None
        usage: Json = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        }
        return usage | ({"tried_tokens": end.tried_tokens} if end.tried_tokens else {})

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": f"response.{kind}", "sequence_number": self._next_number, **fields}
        self._next_number += 1
        return event

    def _unseen(self, events: list[Json]) -> list[Json]:
        last = self._asked.starting_after
        return [event for event in events if event["sequence_number"] > last]

    def _add(self, delta: Delta) -> list[Json]:
        found: list[Json] = []
        if self._call.wants_logprobs:
            self._logprobs += delta.logprobs
        calls = list(delta.tool_calls)
        opened = self._growing
        if calls and opened and (opened.kind, opened.call) == ("function_call", calls[0].index):
            # The text of this delta follows the end of this call.
            found += self._part_of_call(calls.pop(0))
        if delta.reasoning:
            found += self._begin("reasoning", 0)
            found += self._more_reasoning(delta.reasoning)
        if delta.text:
            found += self._begin("message", 0)
            found += self._more_text(delta.text)
        elif delta.reasoning or delta.tool_calls:
            self._logprobs.clear()
        for call in calls:
            found += self._part_of_call(call)
        if delta.finish_reason is not None:
            cut = delta.finish_reason is FinishReason.LENGTH
            found += self._close("incomplete" if cut else "completed")
            self._end = {"status": "completed", "completed_at": int(time.time())}
            if cut:
                details = {"reason": "max_output_tokens"}
                self._end = {"status": "incomplete", "incomplete_details": details}
        return found

    def _begin(self, kind: str, call: int, **head: str) -> list[Json]:
        """Opens an item, unless it is open, and ends the one before."""
        if self._growing is not None and (self._growing.kind, self._growing.call) == (kind, call):
            return []
        found = self._close("completed")
        index = len(self._output)
        item_id = f"{_PREFIXES[kind]}_{self._stream_id}_{index}"
        self._growing = item = _OpenItem(kind, call, {"id": item_id, "type": kind, **head}, index)
        added = self._item(item, "in_progress", None)
        found.append(self._event("output_item.added", output_index=index, item=added))
        if kind == "message":
            part = _output_text("", [])
            found.append(self._of(item, "content_part.added", content_index=0, part=part))
        elif kind == "reasoning":
            found.append(self._reasoning_part(item, "added", ""))
        return found

    def _close(self, status: str) -> list[Json]:
        """Ends the item that is open."""
        item, self._growing = self._growing, None
        if item is None:
            return []
        text, found = "".join(item.pieces), []
        match item.kind:
            case "message":
                whole, place = item.logprobs, {"content_index": 0}
                found += [
                    self._of(item, "output_text.done", **place, text=text, logprobs=whole),
                    self._of(item, "content_part.done", **place, part=_output_text(text, whole)),
                ]
            case "reasoning":
                name, place = self._reasoning_name
                found += [
                    self._of(item, f"{name}.done", **place, text=text),
                    self._reasoning_part(item, "done", text),
                ]
            case "function_call":
                name = item.head["name"]
                found.append(
                    self._of(item, "function_call_arguments.done", name=name, arguments=text)
                )
        done = self._item(item, status, text)
        self._output.append(done)
        found.append(self._event("output_item.done", output_index=item.index, item=done))
        return found

    def _item(self, item: _OpenItem, status: str, text: str | None) -> Json:
        """text: its whole text, or None while it grows."""
        made: Json = {**item.head, "status": status}
        match item.kind:
            case "message":
                content = [] if text is None else [_output_text(text, item.logprobs)]
                return made | {"role": "assistant", "content": content}
            case "reasoning":
                summary = self._asked.summarises
                kind = "summary_text" if summary else "reasoning_text"
                parts = [] if text is None else [{"type": kind, "text": text}]
                made |= {"summary": parts if summary else [], "content": [] if summary else parts}
                if text is not None and self._asked.includes(ENCRYPTED):
                    made["encrypted_content"] = base64.b64encode(text.encode()).decode()
                return made
            case _:
                return made | {"arguments": text or ""}

    def _of(self, item: _OpenItem, kind: str, **fields: Any) -> Json:
        """Returns an event of an item."""
        return self._event(kind, item_id=item.head["id"], output_index=item.index, **fields)

    @property
    def _reasoning_name(self) -> tuple[str, Json]:
        if self._asked.summarises:
            return "reasoning_summary_text", {"summary_index": 0}
        return "reasoning_text", {"content_index": 0}

    def _reasoning_part(self, item: _OpenItem, what: str, text: str) -> Json:
        if self._asked.summarises:
            part = {"type": "summary_text", "text": text}
            return self._of(item, f"reasoning_summary_part.{what}", summary_index=0, part=part)
        part = {"type": "reasoning_text", "text": text}
        return self._of(item, f"content_part.{what}", content_index=0, part=part)

    def _more_reasoning(self, text: str) -> list[Json]:
        assert self._growing is not None
        self._growing.pieces.append(text)
        name, place = self._reasoning_name
        return [self._of(self._growing, f"{name}.delta", **place, delta=text)]

    def _more_text(self, text: str) -> list[Json]:
        item = self._growing
        assert item is not None
        item.pieces.append(text)
        new = [token_logprobs(self._call, entry) for entry in self._logprobs]
        self._logprobs.clear()
        item.logprobs += new
        place = {"content_index": 0}
        return [self._of(item, "output_text.delta", **place, delta=text, logprobs=new)]

    def _part_of_call(self, call: ToolCallDelta) -> list[Json]:
        found = self._begin("function_call", call.index, call_id=call.id, name=call.name)
        if call.arguments:
            item = self._growing
            assert item is not None
            item.pieces.append(call.arguments)
            found.append(self._of(item, "function_call_arguments.delta", delta=call.arguments))
        return found


def _output_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _shown(given: msgspec.Struct) -> Json:
    """Returns what a client gave, without what it left out."""
    found = {name: getattr(given, name) for name in given.__struct_fields__}
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (isinstance(value, msgspec.Raw) and bytes(value) == b"null")
    }


def _shown_tool(tool: ResponsesTool) -> Json:
    return {"parameters": None, "strict": False, **_shown(tool)}


def _error(error: BatonError) -> Json:
    code = "server_error"
    if isinstance(error, InvalidArgument):
        code = "invalid_prompt"
    elif isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}


RESPONSES = WireFormat(
    content_type=b"text/event-stream; charset=utf-8",
    # What has no type is the document of a failure.
    frame=lambda event: (
        b"event: %b\ndata: %b\n\n"
        % (
            event.get("type", "error").encode(),
            encode(event),
        )
    ),
    end=b"",
    keep_alive=b": keep-alive\n\n",
    failure=lambda error, _: error_document(error),
)
