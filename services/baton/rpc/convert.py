"""Converts core values to messages of baton.v1 and back.

Absent fields become core's defaults. An invalid message raises InvalidArgument naming the field;
ranges that depend on the model or the configuration are checked where those are known. Token ids
travel as little-endian int32.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields

from baton.core.errors import BatonError, InvalidArgument, Reason, from_reason
from baton.core.request.attempt import Attempt, ChoiceTokens, Logprobs, SequenceKey
from baton.core.request.model import AnswerFormat, KvLayout, ModelDescription, WorkerIdentity
from baton.core.request.prompt_logprobs import PromptLogprobs
from baton.core.request.request import (
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
from baton.v1 import tokenizer_pb2, types_pb2
from baton.v1 import types_pb2 as pb

_UINT32_MAX = 2**32 - 1
_SAMPLING_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in ("logit_bias", "allowed_token_ids")
)
"""Fields with the same name and value in core and on the wire."""
_FLOAT_FIELDS = tuple(f.name for f in fields(SamplingParams) if isinstance(f.default, float))
_LAYOUT_FIELDS = (
    "model_digest",
    "dtype",
    "num_layers",
    "num_kv_heads",
    "key_size",
    "value_size",
    "min_wire_version",
    "max_wire_version",
)


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
    return pb.WorkerIdentity(
        role=identity.role, instance_id=identity.instance_id, address=identity.address
    )


def identity_from_proto(message: pb.WorkerIdentity) -> WorkerIdentity:
    return WorkerIdentity(message.role, message.instance_id, message.address)


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})


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
    return KvLayout(**{name: getattr(message, name) for name in _LAYOUT_FIELDS})


def model_to_proto(model: ModelDescription) -> pb.ModelDescription:
    return pb.ModelDescription(
        name=model.name,
        digest=model.digest,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_digest=model.tokenizer_digest,
        answer_format=_answer_format_to_proto(model.answer_format),
    )


def model_from_proto(message: pb.ModelDescription) -> ModelDescription:
    return ModelDescription(
        name=message.name,
        digest=message.digest,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        tokenizer_digest=message.tokenizer_digest,
        answer_format=_answer_format_from_proto(message.answer_format),
    )


def _answer_format_to_proto(answers: AnswerFormat) -> pb.AnswerFormat:
    return pb.AnswerFormat(
        tools=answers.tools,
        reasoning=answers.reasoning,
        markers=[pb.MarkerToken(text=text, token_id=token) for text, token in answers.markers],
    )


def _answer_format_from_proto(message: pb.AnswerFormat) -> AnswerFormat:
    markers = tuple((marker.text, marker.token_id) for marker in message.markers)
    return AnswerFormat(message.tools, message.reasoning, markers)


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Sets every field, so that other processes need not know the defaults."""
    return pb.SamplingParams(
        **{name: getattr(params, name) for name in _SAMPLING_FIELDS},
        logit_bias=[pb.LogitBias(token_id=t, bias=bias) for t, bias in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
    )


def sampling_from_proto(message: pb.SamplingParams, field: str = "sampling") -> SamplingParams:
    """Absent fields take core's defaults (seed: 0). Raises InvalidArgument for NaN and infinity."""
    # ListFields returns exactly the fields that are present, including zeros.
    present = {descriptor.name: value for descriptor, value in message.ListFields()}
    given = {name: present[name] for name in _SAMPLING_FIELDS if name in present}
    for name in _FLOAT_FIELDS:
        if name in given and not math.isfinite(given[name]):
            raise InvalidArgument("must be a finite number", field=f"{field}.{name}")
    bias = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    if not all(math.isfinite(value) for _, value in bias):
        raise InvalidArgument("must hold finite numbers", field=f"{field}.logit_bias")
    allowed = tuple(message.allowed_token_ids)
    return SamplingParams(**given, logit_bias=bias, allowed_token_ids=allowed)


def stop_to_proto(stop: StopParams) -> pb.StopParams:
    return pb.StopParams(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
        stop_strings=stop.stop_strings,
        include_stop_string=stop.include_stop_string,
    )


def stop_from_proto(message: pb.StopParams, field: str = "stop") -> StopParams:
    """Raises InvalidArgument without max_tokens: its default depends on prompt and model."""
    if not message.HasField("max_tokens"):
        raise InvalidArgument("must be set", field=f"{field}.max_tokens")
    return StopParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop_strings=tuple(message.stop_strings),
        include_stop_string=message.include_stop_string,
    )


def attempt_to_proto(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(
        request_id=attempt.request_id,
        attempt=attempt.attempt,
        choices=attempt.choices,
        token_ids=token_ids_to_bytes(attempt.token_ids),
        num_prompt_tokens=attempt.num_prompt_tokens,
        sampling=sampling_to_proto(attempt.sampling),
        stop=stop_to_proto(attempt.stop),
        remaining_ms=0 if attempt.remaining_s is None else to_ms(attempt.remaining_s),
        priority=attempt.priority,
        cache_salt=attempt.cache_salt,
        traceparent=attempt.traceparent,
        tenant=attempt.tenant,
        weight=attempt.weight,
        prompt_logprobs=attempt.prompt_logprobs,
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
    return Attempt(
        request_id=message.request_id,
        attempt=message.attempt,
        choices=choices,
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling, "attempt.sampling"),
        stop=stop_from_proto(message.stop, "attempt.stop"),
        priority=message.priority,
        remaining_s=message.remaining_ms / 1000 if message.remaining_ms else None,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        tenant=message.tenant,
        weight=_weight_from_proto(message.weight),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=(
            grammar_from_proto(message.grammar, "attempt.grammar")
            if message.HasField("grammar")
            else None
        ),
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
    return pb.ChoiceTokens(
        request_id=tokens.key.request_id,
        choice=tokens.key.choice,
        attempt=tokens.key.attempt,
        position=tokens.position,
        token_ids=token_ids_to_bytes(tokens.token_ids),
        logprobs=[_logprobs_to_proto(logprobs) for logprobs in tokens.logprobs],
        finish_reason=finish_reason_to_proto(tokens.finish_reason),
        stop_token_id=tokens.stop_token_id,
    )


def choice_tokens_from_proto(message: pb.ChoiceTokens, field: str = "tokens") -> ChoiceTokens:
    key = SequenceKey(message.request_id, message.choice, message.attempt)
    token_ids = token_ids_from_bytes(message.token_ids, f"{field}.token_ids")
    # The fast path: nearly all messages hold token ids only.
    if not (message.logprobs or message.finish_reason or message.HasField("stop_token_id")):
        return ChoiceTokens(key, message.position, token_ids)
    if message.logprobs and len(message.logprobs) != len(token_ids):
        raise InvalidArgument("must have one entry a token, or none", field=f"{field}.logprobs")
    return ChoiceTokens(
        key,
        message.position,
        token_ids,
        logprobs=tuple(_logprobs_from_proto(entry) for entry in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason, f"{field}.finish_reason"),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def prompt_logprobs_to_proto(told: PromptLogprobs | None) -> pb.PromptLogprobs | None:
    if told is None:
        return None
    return pb.PromptLogprobs(num_top=told.num_top, own=told.own, top_ids=told.top_ids, top=told.top)


def prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Raises InvalidArgument when the lengths are inconsistent."""
    told = PromptLogprobs(message.num_top, message.own, message.top_ids, message.top)
    if not told.fits:
        raise InvalidArgument("must have as many of each", field="prompt_logprobs")
    return told


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


def _logprobs_to_proto(logprobs: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return pb.TokenLogprobs(logprob=logprobs.logprob, top=top)


def _logprobs_from_proto(message: pb.TokenLogprobs) -> Logprobs:
    return Logprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


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
    return tokenizer_pb2.Chat(
        messages=[message_to_proto(message) for message in chat.messages],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=[tool_to_proto(tool) for tool in tools],
        template_kwargs=chat.template_kwargs,
        template=chat.template,
    )


def chat_from_proto(message: tokenizer_pb2.Chat) -> ChatPrompt:
    return ChatPrompt(
        messages_from_proto(message.messages),
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
        tools=tools_from_proto(message.tools),
        template_kwargs=message.template_kwargs,
        template=message.template,
    )


def messages_from_proto(
    messages: Iterable[tokenizer_pb2.ChatMessage],
) -> tuple[Message, ...]:
    return tuple(
        Message(
            message.role,
            message.content,
            tool_calls=tuple(
                ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls
            ),
            tool_call_id=message.tool_call_id,
            name=message.name,
            reasoning=message.reasoning,
        )
        for message in messages
    )


def tools_from_proto(tools: Iterable[types_pb2.Tool]) -> tuple[Tool, ...]:
    return tuple(Tool(tool.name, tool.description, tool.parameters) for tool in tools)


def message_to_proto(message: Message) -> tokenizer_pb2.ChatMessage:
    calls = [
        types_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.tool_calls
    ]
    return tokenizer_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def tool_to_proto(tool: Tool) -> types_pb2.Tool:
    return types_pb2.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
