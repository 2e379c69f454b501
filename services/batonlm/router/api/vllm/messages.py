"""Converts `GenerateRequest` to a core Request, and a request's events to messages.

A request with a field that is not listed here is refused, because it could not be applied. The
protocol represents most defaults as zero, so zero means the default here, too.

A stream has one chunk for what is new of a choice, which counts the new tokens only. Every choice
ends with a `complete`, which has all tokens and counts them all; it has only those
log-probabilities that no chunk had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import (
    Accepted,
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    Request,
    SamplingParams,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
)
from batonlm.core.request.validation import check_text
from batonlm.router.api.translation import ANY_OBJECT, choice, lark_or_gbnf

MAX_REQUEST_ID_BYTES = 256
MAX_REQUEST_IDS = 1024
"""Of one Abort."""
_UINT64 = 2**64 - 1

_CORE_NAMES = {
    "stop": "stop_strings",
    "include_stop_str_in_output": "include_stop_string",
    "logprobs": "top_logprobs",
}
"""The protocol's sampling parameter names to core's, where they differ."""
_REQUEST_NAMES = {field.name for field in fields(Request)}
_SAMPLING_NAMES = {field.name for field in fields(SamplingParams)} - {"seed"}

_COPIED = {
    name: core
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    if (core := _CORE_NAMES.get(name, name)) in _REQUEST_NAMES | _SAMPLING_NAMES
    and name != "grammar"
}
"""Fields that are copied to core's field of that name."""

REQUEST_FIELDS = frozenset(
    {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
)
SAMPLING_FIELDS = frozenset(
    {
        *_COPIED,
        *("json_schema", "regex", "grammar", "json_object", "choice"),
        # It concerns text, and answers have only ids.
        "spaces_between_special_tokens",
        # A grammar always starts at the first token.
        "grammar_from_first_token",
    }
)
"""Fields that are applied, or that do not affect token ids."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request of a gateway."""

    request: Request
    request_id: str
    """The gateway's id of the request, used for Abort."""
    stream: bool
    """Whether tokens are streamed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Core's field names to the protocol's, where they differ."""


def call_of(message: pb.GenerateRequest, deadline_s: float | None) -> EngineCall:
    """Raises InvalidArgument naming the field."""
    _only(message, REQUEST_FIELDS, "")
    _only(message.sampling_params, SAMPLING_FIELDS, "sampling_params.")
    if message.data_parallel_rank:
        raise InvalidArgument(
            "data_parallel_rank must be 0: there is one", field="data_parallel_rank"
        )
    check_text("request_id", message.request_id, MAX_REQUEST_ID_BYTES)
    prompt, prompt_name = _prompt(message)
    params = message.sampling_params
    grammar, grammar_name = _grammar(params)
    given: dict[str, Any] = {}
    for descriptor, value in params.ListFields():
        name = _COPIED.get(descriptor.name)
        if name is not None:
            # Repeated fields are not hashable.
            given[name] = tuple(value) if isinstance(value, Sequence) else value
    given["logit_bias"] = tuple(sorted(params.logit_bias.items()))
    if "seed" in given:
        given["seed"] &= _UINT64
    sampling = {name: value for name, value in given.items() if name in _SAMPLING_NAMES}
    rest = {name: value for name, value in given.items() if name in _REQUEST_NAMES}
    # The one field whose zero is not core's default.
    rest["skip_special_tokens"] = params.skip_special_tokens
    request = Request(
        prompt, sampling=SamplingParams(**sampling), deadline_s=deadline_s, grammar=grammar, **rest
    )
    names = {core: f"sampling_params.{name}" for name, core in _COPIED.items()}
    names |= {"prompt": prompt_name, "grammar": grammar_name}
    return EngineCall(request, message.request_id, message.stream, names)


def _only(message: Message, known: Set[str], prefix: str) -> None:
    for descriptor, _ in message.ListFields():
        if descriptor.name not in known:
            name = prefix + descriptor.name
            raise InvalidArgument(f"{name} cannot be applied here", field=name)


def _prompt(message: pb.GenerateRequest) -> tuple[Prompt, str]:
    """Returns the prompt and the name of its field."""
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text), "text"
        case "tokenized":
            return TokenPrompt(tuple(message.tokenized.input_ids)), "tokenized.input_ids"
        case _:
            raise InvalidArgument("input must be set: tokenized or text", field="input")


def _grammar(params: pb.SamplingParams) -> tuple[Grammar | None, str]:
    """Returns the grammar for every choice, and the name of the field that it comes from."""
    name = params.WhichOneof("constraint")
    field = f"sampling_params.{name}"
    match name:
        case None:
            return None, field
        case "grammar":
            return lark_or_gbnf(params.grammar), field
        case "json_object":
            return ANY_OBJECT if params.json_object else None, field
        case "choice":
            field = f"{field}.choices"
            return choice(params.choice.choices, field), field
        case _:
            return Grammar(GrammarKind[name.upper()], getattr(params, name)), field


REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TOOL_CALLS: "stop",
}


class EngineAnswer:
    """Builds the messages of one request from its events. The first event goes to `accepted`."""

    def __init__(self, call: EngineCall) -> None:
        self._stream = call.stream
        self._tops = bool(call.request.sampling.top_logprobs)
        self._prompt_tops = bool(call.request.prompt_logprobs)
        self._prompt_tokens = 0
        self._choices = [_Choice(index) for index in range(call.request.n)]

    def accepted(self, event: Accepted) -> None:
        self._prompt_tokens = event.prompt_tokens
        if event.prompt_logprobs:
            logprobs = _of_prompt(event.prompt_logprobs, self._prompt_tops)
            for each in self._choices:
                each.prompt_logprobs = logprobs

    def delta(self, delta: Delta, cached_tokens: int) -> Iterator[pb.GenerateResponse]:
        choice = self._choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        logprobs = _of_output(delta.logprobs, self._tops)
        if not self._stream:
            choice.logprobs.MergeFrom(logprobs)
        elif delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(delta.token_ids),
                cached_tokens=cached_tokens,
                output_logprobs=logprobs if delta.logprobs else None,
                input_logprobs=choice.take_prompt_logprobs(),
                index=choice.index,
            )
            yield pb.GenerateResponse(chunk=chunk)
        if delta.finish_reason is not None:
            yield self._complete(choice, REASONS[delta.finish_reason], cached_tokens, delta)

    def aborted(self, cached_tokens: int = 0) -> Iterator[pb.GenerateResponse]:
        """Returns the final messages of the choices that have not ended."""
        for each in self._choices:
            if not each.ended:
                yield self._complete(each, "abort", cached_tokens)

    def _complete(
        self, choice: _Choice, reason: str, cached_tokens: int, last: Delta | None = None
    ) -> pb.GenerateResponse:
        choice.ended = True
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=choice.logprobs if choice.logprobs.token_ids else None,
            input_logprobs=choice.take_prompt_logprobs(),
            index=choice.index,
        )
        if last is not None and last.stop_string is not None:
            complete.matched_stop_str = last.stop_string
        elif last is not None and last.stop_token_id is not None:
            complete.matched_token_id = last.stop_token_id
        return pb.GenerateResponse(complete=complete)


class _Choice:
    """What is to be sent of one choice, or is sent again at its end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ended = False
        self.token_ids: list[int] = []
        self.logprobs = pb.OutputLogProbs()
        self.prompt_logprobs: pb.InputLogProbs | None = None

    def take_prompt_logprobs(self) -> pb.InputLogProbs | None:
        """Returns them once, because they go with a choice's first message."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return logprobs


def _of_output(entries: Sequence[TokenLogprobs], tops: bool) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.token.logprob for entry in entries],
        token_ids=[entry.token.token_id for entry in entries],
        top_logprobs=[_top(entry.top) for entry in entries] if tops else (),
    )


def _of_prompt(entries: Sequence[TokenLogprobs], tops: bool) -> pb.InputLogProbs:
    """The first token has no log-probability, because no token precedes it."""
    numbers = [pb.InputTokenLogProb(value=entry.token.logprob) for entry in entries[1:]]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *numbers],
        token_ids=[entry.token.token_id for entry in entries],
        top_logprobs=[_top(entry.top) for entry in entries] if tops else (),
    )


def _top(entries: Sequence[TextLogprob]) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
    )
