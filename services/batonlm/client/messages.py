"""Converts keyword arguments to requests of `baton.v1.Inference`.

Options that are absent are left to the server, which also validates their ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Message, Tool, ToolChoice
from batonlm.rpc.convert import message_to_proto, tool_to_proto
from batonlm.rpc.inference import tool_choice_to_proto
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import tokenizer_pb2

Messages = str | Sequence[Message | Mapping[str, str]]
"""A conversation. A string is a single user message; a mapping has `role` and `content`."""


Texts = str | Sequence[str | Sequence[int]]
"""A text, or several, each as text or token ids."""


class Options(TypedDict, total=False):
    """Generation options. Absent options have the server's default.

    The names are those of the fields of GenerationOptions and its nested messages.
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
    """How many alternatives are reported with each token's log-probability."""
    stop: str | Sequence[str]
    """Texts that end the answer."""
    stop_token_ids: Sequence[int]
    include_stop_string: bool
    ignore_eos: bool
    n: int
    return_token_ids: bool
    keep_special_tokens: bool
    priority: int
    cache_salt: str
    """Requests share cached KV only with requests of the same salt."""
    no_speculation: bool
    """Compute no drafts of the answer, also where workers do that. They change no token."""
    event_ids: bool
    """A stream that breaks off goes on where it was, at whichever router answers next. Default: as
    the client's argument `resume` says."""
    # Constraints on the answer; at most one of these:
    json_object: bool
    json_schema: str
    regex: str
    choice: Sequence[str]
    lark: str
    gbnf: str


def generate_request(prompt: str | Sequence[int], model: str, given: Options) -> pb.GenerateRequest:
    """Builds a request. prompt: text or token ids. Raises InvalidArgument with the option."""
    request = pb.GenerateRequest(model=model, options=_options(given))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        try:
            request.token_ids.ids.extend(prompt)
        except (TypeError, ValueError):
            raise _unfit("prompt") from None
    return request


def chat_request(
    messages: Messages, model: str, tools: Sequence[Tool], choice: ToolChoice | None, given: Options
) -> pb.ChatRequest:
    """Builds a request. Raises InvalidArgument with the option."""
    conversation = [Message("user", messages)] if isinstance(messages, str) else messages
    return pb.ChatRequest(
        model=model,
        messages=[_message(entry) for entry in conversation],
        options=_options(given),
        tools=[tool_to_proto(tool) for tool in tools],
        tool_choice=None if choice is None else tool_choice_to_proto(choice),
    )


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of texts."""

    vectors: tuple[tuple[float, ...], ...]
    """One of each text, in order."""
    prompt_tokens: int
    """Of all texts."""
    model: str
    request_id: str
    """The id that logs and traces carry."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How well texts answer a query."""

    scores: tuple[float, ...]
    """One of each text, in order; a higher one answers better."""
    prompt_tokens: int
    """Of all texts, each with the query."""
    model: str
    request_id: str
    """The id that logs and traces carry."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One of the texts that were ranked."""

    index: int
    """Its place among those that were given."""
    score: float
    document: str


def embed_request(
    inputs: Texts, model: str, dimensions: int, truncate_tokens: int | None, prompt_name: str
) -> pb.EmbedRequest:
    """Builds a request. Raises InvalidArgument with the argument."""
    request = pb.EmbedRequest(model=model)
    for each in [inputs] if isinstance(inputs, str) else inputs:
        try:
            if isinstance(each, str):
                request.inputs.add().text = each
            else:
                request.inputs.add().token_ids.ids.extend(each)
        except (TypeError, ValueError):
            raise _unfit("inputs") from None
    _set_fields(
        request,
        dimensions=dimensions,
        truncate_tokens=truncate_tokens,
        prompt_name=prompt_name,
    )
    return request


def score_request(
    query: str, documents: Sequence[str], model: str, truncate_tokens: int | None
) -> pb.ScoreRequest:
    """Builds a request. Raises InvalidArgument with the argument."""
    request = pb.ScoreRequest(model=model)
    if isinstance(documents, str):
        raise InvalidArgument("documents must be a list of texts", field="documents")
    try:
        request.documents.extend(documents)
    except (TypeError, ValueError):
        raise _unfit("documents") from None
    _set_fields(request, query=query, truncate_tokens=truncate_tokens)
    return request


def _set_fields(request: pb.EmbedRequest | pb.ScoreRequest, **values: Any) -> None:
    for name, value in values.items():
        try:
            if value is not None:
                setattr(request, name, value)
        except (TypeError, ValueError):
            raise _unfit(name) from None


def vectors_from_proto(message: pb.EmbedResponse) -> Vectors:
    vectors = tuple(tuple(each.values) for each in message.vectors)
    return Vectors(vectors, message.prompt_tokens, message.model, message.request_id)


def scores_from_proto(message: pb.ScoreResponse) -> Scores:
    scores = tuple(message.scores)
    return Scores(scores, message.prompt_tokens, message.model, message.request_id)


def ranked(scores: Scores, documents: Sequence[str], top_n: int | None) -> list[Ranked]:
    """The best ones, best first; of equal ones the earlier."""
    found = [
        Ranked(index, score, document)
        for index, (score, document) in enumerate(zip(scores.scores, documents, strict=True))
    ]
    return sorted(found, key=lambda each: -each.score)[:top_n]


def _options(given: Options) -> pb.GenerationOptions:
    """Raises InvalidArgument for a value of the wrong type, TypeError for an unknown name."""
    options = pb.GenerationOptions()
    for name, value in given.items():
        if name not in Options.__annotations__:
            raise TypeError(f"there is no option {name!r}")
        try:
            _set(options, name, value)
        except (TypeError, ValueError):
            raise _unfit(name) from None
    return options


def _set(options: pb.GenerationOptions, name: str, value: Any) -> None:
    parts: list[Any] = [options, options.sampling, options.stop, options.structured_output]
    match name:
        case "stop":
            options.stop.stop_strings.extend([value] if isinstance(value, str) else value)
        case "choice":
            options.structured_output.choice.texts.extend(value)
        case "logit_bias":
            for token_id, bias in value.items():
                options.sampling.logit_bias.add(token_id=token_id, bias=bias)
        case "stop_token_ids":
            options.stop.stop_token_ids.extend(value)
        case "allowed_token_ids":
            options.sampling.allowed_token_ids.extend(value)
        case _:
            part = next(part for part in parts if name in part.DESCRIPTOR.fields_by_name)
            setattr(part, name, value)


def _unfit(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} has a value that it cannot have", field=name)


def _message(entry: Message | Mapping[str, str]) -> tokenizer_pb2.ChatMessage:
    if not isinstance(entry, Message):
        if not {"role", "content"} <= entry.keys():
            raise InvalidArgument("each message needs role and content", field="messages")
        entry = Message(entry["role"], entry["content"])
    return message_to_proto(entry)
