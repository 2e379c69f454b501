"""Keyword arguments to requests of `baton.v1.Inference`.

What is not named is left to the server, whose ranges are not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from baton.core.errors import InvalidArgument
from baton.core.request.request import Message, Tool, ToolChoice, ToolUse
from baton.v1 import inference_pb2 as pb
from baton.v1 import tokenizer_pb2, types_pb2

Messages = str | Sequence[Message | Mapping[str, str]]
"""A conversation; a string is a user's only message, a mapping has `role` and `content`."""


class Options(TypedDict, total=False):
    """How an answer is made. stop: texts that end it. top_logprobs: how many alternatives to report
    with each token's log-probability. cache_salt: KV is shared only among requests of the same one.
    json_object, json_schema, regex, choice, lark, gbnf: the form that it has to have, one of them.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    seed: int
    top_logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_string: bool
    ignore_eos: bool
    n: int
    return_token_ids: bool
    keep_special_tokens: bool
    priority: int
    cache_salt: str
    json_object: bool
    json_schema: str
    regex: str
    choice: Sequence[str]
    lark: str
    gbnf: str


def generate_request(prompt: str | Sequence[int], model: str, given: Options) -> pb.GenerateRequest:
    """prompt: text or token ids. Raises InvalidArgument naming the option."""
    request = pb.GenerateRequest(model=model, options=to_proto(given))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        _put("prompt", lambda: request.token_ids.ids.extend(prompt))
        request.token_ids.SetInParent()
    return request


def chat_request(
    messages: Messages, model: str, tools: Sequence[Tool], choice: ToolChoice | None, given: Options
) -> pb.ChatRequest:
    """Raises InvalidArgument naming the option."""
    said = [Message("user", messages)] if isinstance(messages, str) else messages
    return pb.ChatRequest(
        model=model,
        messages=[_message(entry) for entry in said],
        options=to_proto(given),
        tools=[
            types_pb2.Tool(name=t.name, description=t.description, parameters=t.parameters)
            for t in tools
        ],
        tool_choice=None if choice is None else _tool_choice(choice),
    )


def to_proto(given: Options) -> pb.GenerationOptions:
    """Raises InvalidArgument for what does not fit its field, TypeError for an unknown name."""
    options = pb.GenerationOptions()
    for name, value in given.items():
        if name not in _PUT:
            raise TypeError(f"there is no option {name!r}")
        _put(name, partial(_PUT[name], options, value))
    return options


def _put(name: str, put: Callable[[], None]) -> None:
    try:
        put()
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} has a value that it cannot have", field=name) from None


def _message(entry: Message | Mapping[str, str]) -> tokenizer_pb2.ChatMessage:
    if not isinstance(entry, Message):
        if not {"role", "content"} <= entry.keys():
            raise InvalidArgument("each message needs role and content", field="messages")
        entry = Message(entry["role"], entry["content"])
    return tokenizer_pb2.ChatMessage(
        role=entry.role,
        content=entry.content,
        tool_calls=[
            types_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in entry.tool_calls
        ],
        tool_call_id=entry.tool_call_id,
        name=entry.name,
        reasoning=entry.reasoning,
    )


def _tool_choice(choice: ToolChoice) -> pb.ToolChoice:
    uses = {
        ToolUse.NONE: pb.ToolChoice.USE_NONE,
        ToolUse.AUTO: pb.ToolChoice.USE_AUTO,
        ToolUse.REQUIRED: pb.ToolChoice.USE_REQUIRED,
    }
    return pb.ToolChoice(use=uses[choice.use], name=choice.name, single=not choice.parallel)


_Put = Callable[[pb.GenerationOptions, Any], None]


def _logit_bias(options: pb.GenerationOptions, value: Mapping[int, float]) -> None:
    for token_id, bias in value.items():
        options.sampling.logit_bias.add(token_id=token_id, bias=bias)


def _stop(options: pb.GenerationOptions, value: str | Sequence[str]) -> None:
    options.stop.stop_strings.extend([value] if isinstance(value, str) else value)


def _set(where: str, name: str) -> _Put:
    """where: a message of the options, or "" for a field of their own."""

    def put(options: pb.GenerationOptions, value: Any) -> None:
        setattr(getattr(options, where) if where else options, name, value)

    return put


_PUT: Mapping[str, _Put] = {
    **{
        name: _set("sampling", name)
        for name in (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "seed", "top_logprobs",
        )
    },
    **{
        name: _set("stop", name)
        for name in ("max_tokens", "min_tokens", "include_stop_string", "ignore_eos")
    },
    **{
        name: _set("", name)
        for name in ("n", "return_token_ids", "keep_special_tokens", "priority", "cache_salt")
    },
    **{
        name: _set("structured_output", name)
        for name in ("json_object", "json_schema", "regex", "lark", "gbnf")
    },
    "logit_bias": _logit_bias,
    "allowed_token_ids": lambda options, value: options.sampling.allowed_token_ids.extend(value),
    "stop": _stop,
    "stop_token_ids": lambda options, value: options.stop.stop_token_ids.extend(value),
    "choice": lambda options, value: options.structured_output.choice.texts.extend(value),
}  # fmt: skip
