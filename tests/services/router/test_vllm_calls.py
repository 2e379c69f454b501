"""Requests and answers of VllmEngine, with the protocol's own messages; nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.request import (
    Accepted,
    Delta,
    FinishReason,
    GrammarKind,
    Request,
    SamplingParams,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
)
from batonlm.core.request.validation import validate
from batonlm.router.api.translation import ANY_OBJECT, in_client_words
from batonlm.router.api.vllm.engine import VllmEngine
from batonlm.router.api.vllm.messages import (
    REASONS,
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    EngineAnswer,
    EngineCall,
    call_of,
)

REFUSED_REQUEST_FIELDS = {
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
}
REFUSED_SAMPLING_FIELDS = {"structural_tag"}


def params(**fields: object) -> pb.SamplingParams:
    return pb.SamplingParams(**fields)  # type: ignore[arg-type]


def understood(sampling: pb.SamplingParams | None = None, **fields: object) -> Request:
    message = pb.GenerateRequest(text="hello", sampling_params=sampling, **fields)  # type: ignore[arg-type]
    return validate(call_of(message, None).request)


def refused(message: pb.GenerateRequest) -> BatonError:
    """As a client is told."""
    with pytest.raises(InvalidArgument) as caught:
        call = call_of(message, None)
        try:
            validate(call.request)
        except BatonError as error:
            raise in_client_words(error, call.names) from None
    return caught.value


def test_what_is_not_said_is_the_default() -> None:
    assert understood() == Request(prompt=TextPrompt("hello"), skip_special_tokens=False)
    assert understood(params()) == understood()
    assert understood().sampling == SamplingParams()
    assert understood(params(temperature=0.0)).sampling.greedy


def test_every_field_that_is_applied() -> None:
    asked = params(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=2.0,
        max_tokens=30,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        ignore_eos=True,
        n=4,
        logprobs=2,
        prompt_logprobs=0,
        seed=-1,
        include_stop_str_in_output=True,
        logit_bias={9: -1.5, 3: 100.0},
        truncate_prompt_tokens=-1,
        grammar_from_first_token=True,
        regex="[0-9]+",
    )
    ids = pb.TokenizedInput(input_ids=[1, 2, 3], original_text="not looked at")
    message = pb.GenerateRequest(tokenized=ids, sampling_params=asked, data_parallel_rank=0)
    request = validate(call_of(message, 5.0).request)
    assert request.grammar is not None and request.grammar.kind is GrammarKind.REGEX
    assert request == Request(
        prompt=TokenPrompt((1, 2, 3)),
        n=4,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            repetition_penalty=2.0,
            presence_penalty=-1.0,
            frequency_penalty=1.0,
            logit_bias=((3, 100.0), (9, -1.5)),
            top_logprobs=2,
        ),
        seed=2**64 - 1,
        max_tokens=30,
        min_tokens=3,
        stop_token_ids=(5, 6),
        stop_strings=("a", "b"),
        include_stop_string=True,
        ignore_eos=True,
        skip_special_tokens=True,
        deadline_s=5.0,
        grammar=request.grammar,
        prompt_logprobs=0,
        truncate_prompt_tokens=-1,
    )


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        (params(json_schema='{"type": "array"}'), GrammarKind.JSON_SCHEMA, '{"type": "array"}'),
        (params(json_object=True), ANY_OBJECT.kind, ANY_OBJECT.text),
        (params(grammar='root ::= "a"'), GrammarKind.GBNF, 'root ::= "a"'),
        (params(grammar='start: "a"'), GrammarKind.LARK, 'start: "a"'),
        (
            params(choice=pb.ChoiceConstraint(choices=["a.", "b"])),
            GrammarKind.REGEX,
            r"a\x{2E}|b",
        ),
    ],
)
def test_every_way_to_ask_for_a_form(form: pb.SamplingParams, kind: GrammarKind, text: str) -> None:
    grammar = understood(form).grammar
    assert grammar is not None and (grammar.kind, grammar.text) == (kind, text)


def test_a_form_that_is_turned_off_is_none() -> None:
    assert understood(params(json_object=False)).grammar is None


KV = pb.KvTransferParams(remote_host="elsewhere", remote_port=1)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**31])), "tokenized.input_ids"),
        (pb.GenerateRequest(text="x", request_id="i" * 257), "request_id"),
        (pb.GenerateRequest(text="x", kv_transfer_params=KV), "kv_transfer_params"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="x", data_parallel_rank=1), "data_parallel_rank"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(text="x", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (pb.GenerateRequest(text="x", media_refs=pb.MediaRefs()), "media_refs"),
    ],
)
def test_what_cannot_be_applied_is_named(message: pb.GenerateRequest, field: str) -> None:
    error = refused(message)
    assert error.field == field
    assert error.message.startswith(field)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (params(structural_tag="{}"), "structural_tag"),
        (params(temperature=-1.0), "temperature"),
        (params(temperature=math.nan), "temperature"),
        (params(top_p=math.inf), "top_p"),
        (params(top_k=2**32 - 1), "top_k"),
        (params(repetition_penalty=-1.0), "repetition_penalty"),
        (params(n=17), "n"),
        (params(max_tokens=0), "max_tokens"),
        (params(min_tokens=5, max_tokens=4), "min_tokens"),
        (params(logprobs=-1), "logprobs"),
        (params(prompt_logprobs=21), "prompt_logprobs"),
        (params(stop=[""]), "stop"),
        (params(stop_token_ids=[2**32 - 1]), "stop_token_ids"),
        (params(logit_bias={-1: 1.0}), "logit_bias"),
        (params(logit_bias={1: math.nan}), "logit_bias"),
        (params(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (params(regex=""), "regex"),
        (params(choice=pb.ChoiceConstraint()), "choice.choices"),
    ],
)
def test_bad_values_are_named(sampling: pb.SamplingParams, field: str) -> None:
    error = refused(pb.GenerateRequest(text="x", sampling_params=sampling))
    assert error.field == f"sampling_params.{field}"
    assert error.message.startswith(error.field)


def names(message: Message) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_a_field_that_the_protocol_gains_is_decided_on_here() -> None:
    """Until then it is refused where it is set."""
    assert names(pb.GenerateRequest()) == REQUEST_FIELDS | REFUSED_REQUEST_FIELDS
    assert names(pb.SamplingParams()) == SAMPLING_FIELDS | REFUSED_SAMPLING_FIELDS


def test_a_call_that_the_protocol_gains_is_decided_on_here() -> None:
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    assert {method.name for method in service.methods} <= vars(VllmEngine).keys()


def test_every_reason_has_a_word() -> None:
    assert REASONS.keys() == set(FinishReason)


def entry(token_id: int, *others: int) -> TokenLogprobs:
    top = tuple(TextLogprob(other, b"", -other / 4) for other in others)
    return TokenLogprobs(TextLogprob(token_id, b"", -token_id / 4), top)


EVENTS = (
    Delta(0, token_ids=(1, 2), logprobs=(entry(1, 1, 5), entry(2, 2, 5))),
    Delta(1, token_ids=(7,), logprobs=(entry(7, 7, 5),), finish_reason=FinishReason.LENGTH),
    Delta(0, text="held back"),
    Delta(0, token_ids=(3,), logprobs=(entry(3, 3, 5),), finish_reason=FinishReason.STOP,
          stop_string="x"),
)  # fmt: skip
PROMPT = (entry(10), entry(11, 11), entry(12, 9))


def told(*, stream: bool) -> Iterator[pb.GenerateResponse]:
    sampling = SamplingParams(top_logprobs=2)
    request = Request(TextPrompt("x"), n=2, sampling=sampling, prompt_logprobs=1)
    answer = EngineAnswer(EngineCall(request, "", stream))
    answer.accepted(Accepted("id", "model", 3, 0, prompt_logprobs=PROMPT))
    for event in EVENTS:
        yield from answer.delta(event, 2)
    assert not list(answer.aborted())


def check_prompt(logprobs: pb.InputLogProbs) -> None:
    first, *rest = logprobs.token_logprobs
    assert not first.HasField("value")
    assert [one.value for one in rest] == [-2.75, -3.0]
    assert list(logprobs.token_ids) == [10, 11, 12]
    assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[], [11], [9]]


def test_a_stream_tells_what_is_new_and_ends_every_choice() -> None:
    first, other, other_end, more, end = told(stream=True)
    assert list(first.chunk.token_ids) == list(first.chunk.output_logprobs.token_ids) == [1, 2]
    assert [list(t.token_ids) for t in first.chunk.output_logprobs.top_logprobs] == [[1, 5], [2, 5]]
    counts = (first.chunk.prompt_tokens, first.chunk.completion_tokens, first.chunk.cached_tokens)
    assert counts == (3, 2, 2)
    for message in (first, other):
        check_prompt(message.chunk.input_logprobs)
    assert not more.chunk.HasField("input_logprobs")
    assert (other.chunk.index, other_end.complete.index) == (1, 1)
    assert (other_end.complete.finish_reason, list(other_end.complete.output_ids)) == (
        "length",
        [7],
    )
    assert other_end.complete.WhichOneof("matched_stop") is None
    assert more.chunk.completion_tokens == 1
    assert (end.complete.finish_reason, end.complete.matched_stop_str) == ("stop", "x")
    assert list(end.complete.output_ids) == [1, 2, 3]
    assert end.complete.completion_tokens == 3
    assert not end.complete.HasField("output_logprobs")
    assert not end.complete.HasField("input_logprobs")


def test_without_a_stream_all_is_told_at_the_end() -> None:
    other, end = (message.complete for message in told(stream=False))
    assert (other.index, end.index) == (1, 0)
    for complete in (other, end):
        check_prompt(complete.input_logprobs)
    assert list(end.output_ids) == list(end.output_logprobs.token_ids) == [1, 2, 3]
    assert list(end.output_logprobs.token_logprobs) == [-0.25, -0.5, -0.75]
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (3, 3, 2)
