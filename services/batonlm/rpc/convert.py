"""Converts core values to messages of baton.v1 and back.

Fields of equal name and value are copied by name (`filled`, `parsed`); the functions below convert
the others. Absent fields become core's defaults. An invalid message raises InvalidArgument naming
the field; ranges that depend on the model or the configuration are checked where those are known.
Token ids travel as little-endian int32.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from batonlm.core.errors import BatonError, InvalidArgument, Reason, from_reason
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import Attempt, ChoiceTokens, Logprobs, SequenceKey
from batonlm.core.request.model import (
    AdapterDescription,
    AnswerFormat,
    KvLayout,
    ModelDescription,
    ModelTask,
    WorkerIdentity,
)
from batonlm.core.request.prompt_logprobs import PromptLogprobs
from batonlm.core.request.request import (
    ChatPrompt,
    FinishReason,
    Grammar,
    GrammarKind,
    Message,
    SamplingParams,
    StopParams,
    Tool,
    ToolCall,
    ToolUse,
)
from batonlm.v1 import handover_pb2, tokenizer_pb2, types_pb2
from batonlm.v1 import types_pb2 as pb

_UINT32_MAX = 2**32 - 1
_FLOAT_FIELDS = tuple(f.name for f in fields(SamplingParams) if isinstance(f.default, float))

P = TypeVar("P", bound=ProtoMessage)
T = TypeVar("T")


def _common_names(kind: type, message: Any) -> Sequence[tuple[str, ...]]:
    """Returns the names of a message's fields that a dataclass has, too: single values, values that
    may be absent, and repeated values. message: its descriptor."""
    names = {field.name for field in fields(kind)}
    shared = [field for field in message.fields if field.name in names]
    return (
        tuple(f.name for f in shared if not (f.has_presence or f.is_repeated)),
        tuple(f.name for f in shared if f.has_presence),
        tuple(f.name for f in shared if f.is_repeated),
    )


_shared: Callable[[type, Any], Sequence[tuple[str, ...]]] = cache(_common_names)


def filled(message: type[P], value: object, **own: Any) -> P:
    """Returns a message of this type with the values of a dataclass's fields of the same names.
    own: the values of fields that differ. None leaves a field out."""
    for names in _shared(type(value), message.DESCRIPTOR):
        for name in names:
            if name not in own:
                own[name] = getattr(value, name)
    return message(**own)


def parsed(kind: type[T], message: ProtoMessage, **own: Any) -> T:
    """Returns a dataclass of this type with the values of a message's fields of the same names,
    repeated ones as tuples; a field that is absent keeps the dataclass's default. own: the values
    of fields that differ."""
    single, optional, repeated = _shared(kind, message.DESCRIPTOR)
    for name in single:
        if name not in own:
            own[name] = getattr(message, name)
    for name in optional:
        if name not in own and message.HasField(name):
            own[name] = getattr(message, name)
    for name in repeated:
        if name not in own:
            own[name] = tuple(getattr(message, name))
    return kind(**own)


def token_ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32. Ids are 0 to 2**31 - 1."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_ids_from_bytes(data: bytes, field: str) -> tuple[int, ...]:
    """The inverse of `token_ids_to_bytes`. Raises InvalidArgument for a wrong length or a negative
    id."""
    # The fast path for one token, the usual output of a sequence in a step.
    if len(data) == 4 and data[3] < 0x80:
        return (int.from_bytes(data, "little"),)
    if len(data) % 4:
        raise InvalidArgument("must be int32 values: its length is no multiple of 4", field=field)
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    if ids and min(ids) < 0:
        raise InvalidArgument("must not hold negative token ids", field=field)
    return tuple(ids)


def identity_to_proto(identity: WorkerIdentity) -> pb.WorkerIdentity:
    return filled(pb.WorkerIdentity, identity)


def identity_from_proto(message: pb.WorkerIdentity) -> WorkerIdentity:
    return parsed(WorkerIdentity, message)


def prefix_to_proto(prefix: Prefix) -> handover_pb2.Prefix:
    return handover_pb2.Prefix(
        token_ids=token_ids_to_bytes(prefix.token_ids),
        cache_salt=prefix.cache_salt,
        adapter=prefix.adapter,
    )


def prefix_from_proto(message: handover_pb2.Prefix) -> Prefix:
    """Raises InvalidArgument for a bad or empty input."""
    token_ids = token_ids_from_bytes(message.token_ids, "prefix.token_ids")
    if not token_ids:
        raise InvalidArgument("must hold at least one token", field="prefix.token_ids")
    return Prefix(token_ids, message.cache_salt, message.adapter)


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return filled(pb.KvLayout, layout)


def layout_from_proto(message: pb.KvLayout, field: str = "layout") -> KvLayout:
    if not message.dtype:
        # An unknown dtype is accepted: two newer workers may both support it.
        raise InvalidArgument("must be set", field=f"{field}.dtype")
    for name in ("num_layers", "num_kv_heads", "key_size"):
        if getattr(message, name) == 0:
            raise InvalidArgument("must be at least 1", field=f"{field}.{name}")
    if message.min_wire_version > message.max_wire_version:
        raise InvalidArgument(
            "must not be above max_wire_version", field=f"{field}.min_wire_version"
        )
    return parsed(KvLayout, message)


_TASKS = {pb.ModelTask.Value(f"MODEL_TASK_{task.name}"): task for task in ModelTask}


def model_to_proto(model: ModelDescription) -> pb.ModelDescription:
    markers = [pb.MarkerToken(text=t, token_id=id_) for t, id_ in model.answer_format.markers]
    answers = filled(pb.AnswerFormat, model.answer_format, markers=markers)
    task = pb.ModelTask.Value(f"MODEL_TASK_{model.task.name}")
    return filled(pb.ModelDescription, model, answer_format=answers, task=task)


def model_from_proto(message: pb.ModelDescription) -> ModelDescription:
    markers = tuple((marker.text, marker.token_id) for marker in message.answer_format.markers)
    answers = parsed(AnswerFormat, message.answer_format, markers=markers)
    task = _TASKS.get(message.task, ModelTask.GENERATE)
    return parsed(ModelDescription, message, answer_format=answers, task=task)


def adapter_from_proto(message: pb.AdapterDescription) -> AdapterDescription:
    return parsed(AdapterDescription, message)


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Sets every field, so that other processes need not know the defaults."""
    bias = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias]
    return filled(pb.SamplingParams, params, logit_bias=bias)


def sampling_from_proto(message: pb.SamplingParams, field: str = "sampling") -> SamplingParams:
    """Absent fields take core's defaults (seed: 0). Raises InvalidArgument for NaN and infinity."""
    for name in _FLOAT_FIELDS:
        if not math.isfinite(getattr(message, name)):
            raise InvalidArgument("must be a finite number", field=f"{field}.{name}")
    bias = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    if not all(math.isfinite(value) for _, value in bias):
        raise InvalidArgument("must hold finite numbers", field=f"{field}.logit_bias")
    return parsed(SamplingParams, message, logit_bias=bias)


def stop_to_proto(stop: StopParams) -> pb.StopParams:
    return filled(pb.StopParams, stop)


def stop_from_proto(message: pb.StopParams, field: str = "stop") -> StopParams:
    """Raises InvalidArgument without max_tokens: its default depends on prompt and model."""
    if not message.HasField("max_tokens"):
        raise InvalidArgument("must be set", field=f"{field}.max_tokens")
    return parsed(StopParams, message)


def attempt_to_proto(attempt: Attempt) -> pb.Attempt:
    return filled(
        pb.Attempt,
        attempt,
        token_ids=token_ids_to_bytes(attempt.token_ids),
        sampling=sampling_to_proto(attempt.sampling),
        stop=stop_to_proto(attempt.stop),
        remaining_ms=0 if attempt.remaining_s is None else to_ms(attempt.remaining_s),
        grammar=None if attempt.grammar is None else grammar_to_proto(attempt.grammar),
    )


def attempt_from_proto(message: pb.Attempt) -> Attempt:
    """Raises InvalidArgument for a missing id, missing or repeated choices, or a bad input."""
    if not message.request_id:
        raise InvalidArgument("must be set", field="attempt.request_id")
    choices = tuple(message.choices)
    if not choices or len(set(choices)) != len(choices):
        raise InvalidArgument("must name at least one choice, each once", field="attempt.choices")
    token_ids = token_ids_from_bytes(message.token_ids, "attempt.token_ids")
    if not token_ids:
        raise InvalidArgument("must hold at least one token", field="attempt.token_ids")
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise InvalidArgument(
            f"must be from 1 to the {len(token_ids)} input tokens",
            field="attempt.num_prompt_tokens",
        )
    grammar = message.grammar if message.HasField("grammar") else None
    return parsed(
        Attempt,
        message,
        choices=choices,
        token_ids=token_ids,
        sampling=sampling_from_proto(message.sampling, "attempt.sampling"),
        stop=stop_from_proto(message.stop, "attempt.stop"),
        remaining_s=message.remaining_ms / 1000 if message.remaining_ms else None,
        weight=_weight_from_proto(message.weight),
        grammar=None if grammar is None else grammar_from_proto(grammar, "attempt.grammar"),
    )


def _weight_from_proto(weight: float) -> float:
    """0 means not set: 1. Raises InvalidArgument outside 0.001 to 1000: an extreme weight would
    starve all other tenants."""
    if not weight:
        return 1.0
    if not 1e-3 <= weight <= 1e3:
        raise InvalidArgument("must be from 0.001 to 1000", field="attempt.weight")
    return weight


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=_GRAMMAR_TO_PROTO[grammar.kind], text=grammar.text)


def grammar_from_proto(message: pb.Grammar, field: str) -> Grammar:
    """Raises InvalidArgument for a kind that this version does not know."""
    if message.kind not in _GRAMMAR_FROM_PROTO:
        raise InvalidArgument(f"has no value {message.kind:d}", field=f"{field}.kind")
    return Grammar(_GRAMMAR_FROM_PROTO[message.kind], message.text)


def choice_tokens_to_proto(tokens: ChoiceTokens) -> pb.ChoiceTokens:
    # There is one for each token that decode makes, and arguments take protobuf three times as long
    # as assignments, those without a value too.
    message = pb.ChoiceTokens()
    message.request_id, message.choice, message.attempt = tokens.key
    message.position = tokens.position
    message.token_ids = token_ids_to_bytes(tokens.token_ids)
    if tokens.logprobs:
        message.logprobs.extend(logprobs_to_proto(tokens.logprobs))
    if tokens.finish_reason is not None:
        message.finish_reason = finish_reason_to_proto(tokens.finish_reason)
    if tokens.stop_token_id is not None:
        message.stop_token_id = tokens.stop_token_id
    if tokens.saved_steps:
        message.saved_steps = tokens.saved_steps
    return message


def choice_tokens_from_proto(message: pb.ChoiceTokens, field: str = "tokens") -> ChoiceTokens:
    key = SequenceKey(message.request_id, message.choice, message.attempt)
    token_ids = token_ids_from_bytes(message.token_ids, f"{field}.token_ids")
    # The fast path: nearly all messages hold token ids only.
    if not (message.logprobs or message.finish_reason or message.HasField("stop_token_id")):
        saved_steps = message.saved_steps
        return ChoiceTokens(key, message.position, token_ids, saved_steps=saved_steps)
    if message.logprobs and len(message.logprobs) != len(token_ids):
        raise InvalidArgument("must have one entry a token, or none", field=f"{field}.logprobs")
    return ChoiceTokens(
        key,
        message.position,
        token_ids,
        logprobs=logprobs_from_proto(message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason, f"{field}.finish_reason"),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        saved_steps=message.saved_steps,
    )


def prompt_logprobs_to_proto(entries: PromptLogprobs | None) -> pb.PromptLogprobs | None:
    return None if entries is None else filled(pb.PromptLogprobs, entries)


def prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Raises InvalidArgument when the lengths are inconsistent."""
    entries = parsed(PromptLogprobs, message)
    if not entries.fits:
        raise InvalidArgument("must have as many of each", field="prompt_logprobs")
    return entries


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: pb.FinishReason.ValueType, field: str) -> FinishReason | None:
    """None for a choice that has not ended. Raises InvalidArgument for a reason that this version
    does not know."""
    if value == pb.FINISH_REASON_UNSPECIFIED:
        return None
    if value not in _FINISH_FROM_PROTO:
        raise InvalidArgument(f"has no value {value:d}", field=field)
    return _FINISH_FROM_PROTO[value]


def error_to_proto(error: BatonError) -> pb.Error:
    return pb.Error(
        reason=_REASON_TO_PROTO[error.reason],
        message=error.message,
        field=error.field,
        retry_after_ms=0 if error.retry_after_s is None else to_ms(error.retry_after_s),
    )


def error_from_proto(message: pb.Error) -> BatonError:
    """A reason that this version does not know becomes INTERNAL: it is still a failure."""
    return from_reason(
        _REASON_FROM_PROTO.get(message.reason, Reason.INTERNAL),
        message.message,
        field=message.field,
        retry_after_s=message.retry_after_ms / 1000 if message.retry_after_ms else None,
    )


def to_ms(seconds: float) -> int:
    """Whole milliseconds for a uint32 field in which 0 means "none": rounded up, at least 1."""
    # Rounded to microseconds first: 4.001 * 1000 is a little more than 4001.
    return min(max(math.ceil(round(seconds * 1000, 3)), 1), _UINT32_MAX)


def logprobs_to_proto(logprobs: Iterable[Logprobs]) -> Iterator[pb.TokenLogprobs]:
    for each in logprobs:
        top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in each.top]
        yield pb.TokenLogprobs(logprob=each.logprob, top=top)


def logprobs_from_proto(entries: Iterable[pb.TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )


_FINISH_TO_PROTO = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
_FINISH_FROM_PROTO = {value: reason for reason, value in _FINISH_TO_PROTO.items()}
_GRAMMAR_TO_PROTO = {
    kind: pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind
}
_GRAMMAR_FROM_PROTO = {value: kind for kind, value in _GRAMMAR_TO_PROTO.items()}
_REASON_TO_PROTO = {
    reason: pb.ErrorReason.Value(f"ERROR_REASON_{reason.name}") for reason in Reason
}
_REASON_FROM_PROTO = {value: reason for reason, value in _REASON_TO_PROTO.items()}


def chat_to_proto(chat: ChatPrompt) -> tokenizer_pb2.Chat:
    """The parts that a chat template uses. With tool_choice "none", tools are left out."""
    tools = chat.tools if chat.tool_choice.use is not ToolUse.NONE else ()
    return filled(
        tokenizer_pb2.Chat,
        chat,
        messages=[message_to_proto(message) for message in chat.messages],
        tools=[tool_to_proto(tool) for tool in tools],
    )


def chat_from_proto(message: tokenizer_pb2.Chat) -> ChatPrompt:
    return parsed(
        ChatPrompt,
        message,
        messages=messages_from_proto(message.messages),
        tools=tools_from_proto(message.tools),
    )


def messages_from_proto(messages: Iterable[tokenizer_pb2.ChatMessage]) -> tuple[Message, ...]:
    return tuple(
        parsed(
            Message,
            message,
            tool_calls=tuple(parsed(ToolCall, call) for call in message.tool_calls),
        )
        for message in messages
    )


def tools_from_proto(tools: Iterable[types_pb2.Tool]) -> tuple[Tool, ...]:
    return tuple(parsed(Tool, tool) for tool in tools)


def message_to_proto(message: Message) -> tokenizer_pb2.ChatMessage:
    calls = [filled(types_pb2.ToolCall, call) for call in message.tool_calls]
    return filled(tokenizer_pb2.ChatMessage, message, tool_calls=calls)


def tool_to_proto(tool: Tool) -> types_pb2.Tool:
    return filled(types_pb2.Tool, tool)
