"""`GenerateRequest` to a core Request.

What is asked for and cannot be applied is refused: whatever field is set and not named here. The
protocol writes most of its defaults as zero, so zero means them here too.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, InvalidArgument
from baton.core.observe.stages import TraceContext
from baton.core.request.request import Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from baton.core.request.validation import check_text
from baton.router.api.structured import (
    Asked,
    any_object,
    choice,
    either_grammar,
    json_schema,
    regex,
)
from baton.router.api.wording import in_client_words
from baton.rpc.errors import with_hint

MAX_REQUEST_ID_BYTES = 256
MAX_REQUEST_IDS = 1024
"""Of one Abort."""

REQUEST_FIELDS = frozenset(
    {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
)
SAMPLING_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
        *("logprobs", "prompt_logprobs"),
        *("json_schema", "regex", "grammar", "json_object", "choice"),
        # Of text, and only ids leave here.
        "spaces_between_special_tokens",
        # A grammar never starts elsewhere.
        "grammar_from_first_token",
    }
)
"""Fields that are applied, or that change nothing of token ids."""

_UINT64 = 2**64 - 1
_NAMES = {
    "stop_strings": "stop",
    "include_stop_string": "include_stop_str_in_output",
    "top_logprobs": "logprobs",
}
_SAMPLING = {
    name: f"sampling_params.{_NAMES.get(name, name)}" for name in SAMPLING_FIELDS | {*_NAMES}
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request, understood. stream: tokens are told as they come. names: core's field names to
    the protocol's, where they differ."""

    request: Request
    request_id: str
    stream: bool
    names: dict[str, str] = field(default_factory=dict)

    def of(self, tenant: Tenant, trace: TraceContext) -> Call:
        """The same call, of whoever made it, as a part of its trace."""
        return replace(self, request=self.request.of(tenant, trace))

    def in_client_words(self, error: BatonError) -> BatonError:
        """The same failure with the protocol's name of the field, in its message too, and a hint
        when to try again where that may help."""
        return in_client_words(with_hint(error), self.names)


def call_of(message: pb.GenerateRequest, deadline_s: float | None) -> Call:
    """Raises InvalidArgument naming the field."""
    _only(message, REQUEST_FIELDS, "")
    _only(message.sampling_params, SAMPLING_FIELDS, "sampling_params.")
    if message.data_parallel_rank:
        raise InvalidArgument(
            "data_parallel_rank must be 0: there is one", field="data_parallel_rank"
        )
    check_text("request_id", message.request_id, MAX_REQUEST_ID_BYTES)
    prompt, name = _prompt(message)
    params = message.sampling_params
    form = _form(params)
    request = Request(
        prompt=prompt,
        n=params.n or 1,
        sampling=_sampling(params),
        seed=params.seed & _UINT64 if params.HasField("seed") else None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop_strings=tuple(params.stop),
        include_stop_string=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        deadline_s=deadline_s,
        grammar=form and form.grammar,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        truncate_prompt_tokens=(
            params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
        ),
    )
    names = {**_SAMPLING, "prompt": name, **({"grammar": form.field} if form else {})}
    return Call(request, message.request_id, message.stream, names)


def _only(message: Message, known: Set[str], prefix: str) -> None:
    for descriptor, _ in message.ListFields():
        if descriptor.name not in known:
            name = prefix + descriptor.name
            raise InvalidArgument(f"{name} cannot be applied here", field=name)


def _prompt(message: pb.GenerateRequest) -> tuple[Prompt, str]:
    """And the name of its field."""
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text), "text"
        case "tokenized":
            return TokenPrompt(tuple(message.tokenized.input_ids)), "tokenized.input_ids"
        case _:
            raise InvalidArgument("input must be set: tokenized or text", field="input")


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        top_logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _form(params: pb.SamplingParams) -> Asked | None:
    """What every choice has to look like, if that is asked."""
    name = params.WhichOneof("constraint")
    where = f"sampling_params.{name}"
    match name:
        case "json_schema":
            return json_schema(params.json_schema, where)
        case "regex":
            return regex(params.regex, where)
        case "grammar":
            return either_grammar(params.grammar, where)
        case "json_object":
            return any_object(where) if params.json_object else None
        case "choice":
            return choice(params.choice.choices, f"{where}.choices")
        case _:
            return None
