"""Conversion is total: what core can say comes back unchanged, all else is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument, Reason, from_reason
from batonlm.core.request.attempt import Attempt, ChoiceTokens, Logprobs, SequenceKey
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.request.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    StopParams,
)
from batonlm.rpc import convert
from batonlm.v1 import types_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
token_id = st.integers(0, 2**31 - 1)
float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
name = st.text(max_size=12)
token_ids = st.lists(token_id, max_size=8).map(tuple)

identities = st.builds(WorkerIdentity, name, name, name)
layouts = st.builds(
    KvLayout,
    model_digest=name,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    num_layers=st.integers(1, 200),
    num_kv_heads=st.integers(1, 200),
    key_size=st.integers(1, 1000),
    value_size=st.integers(0, 1000),
    min_wire_version=st.integers(1, 3),
    max_wire_version=st.integers(3, 5),
)
models = st.builds(ModelDescription, name, name, uint32, uint32, token_ids, name)
samplings = st.builds(
    SamplingParams,
    temperature=float32,
    top_p=float32,
    top_k=st.integers(-(2**31), 2**31 - 1),
    min_p=float32,
    repetition_penalty=float32,
    presence_penalty=float32,
    frequency_penalty=float32,
    logit_bias=st.lists(st.tuples(token_id, float32), max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.none() | st.integers(0, 20),
)
stops = st.builds(
    StopParams,
    max_tokens=uint32,
    min_tokens=uint32,
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    stop_strings=st.lists(name, max_size=3).map(tuple),
    include_stop_string=st.booleans(),
)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    ids = draw(st.lists(token_id, min_size=1, max_size=9))
    return Attempt(
        request_id=draw(st.text(min_size=1, max_size=9)),
        attempt=draw(uint32),
        choices=tuple(draw(st.sets(st.integers(0, 15), min_size=1))),
        token_ids=tuple(ids),
        num_prompt_tokens=draw(st.integers(1, len(ids))),
        sampling=draw(samplings),
        stop=draw(stops),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        remaining_s=draw(st.none() | st.integers(1, 2**32 - 1).map(lambda ms: ms / 1000)),
        cache_salt=draw(st.binary(max_size=8)),
        traceparent=draw(name),
        tenant=draw(name),
        weight=draw(st.floats(0.001, 1000)),
        grammar=draw(st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), name)),
        no_speculation=draw(st.booleans()),
    )


@st.composite
def choice_tokens(draw: st.DrawFn) -> ChoiceTokens:
    ids = draw(token_ids)
    top = st.lists(st.tuples(token_id, float32), max_size=2).map(tuple)
    logprobs = st.builds(Logprobs, float32, top)
    return ChoiceTokens(
        key=SequenceKey(draw(name), draw(uint32), draw(uint32)),
        position=draw(uint32),
        token_ids=ids,
        logprobs=tuple(draw(logprobs) for _ in ids) if draw(st.booleans()) else (),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        stop_token_id=draw(st.none() | token_id),
        saved_steps=draw(st.just(0) | uint32),
    )


@given(token_ids)
def test_token_ids(ids: tuple[int, ...]) -> None:
    data = convert.token_ids_to_bytes(ids)
    assert data == b"".join(i.to_bytes(4, "little") for i in ids)
    assert convert.token_ids_from_bytes(data, "f") == ids


@pytest.mark.parametrize("data", [b"\x01", b"\x00\x00\x00\x00\x01", b"\xff\xff\xff\xff"])
def test_token_ids_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        convert.token_ids_from_bytes(data, "some.field")
    assert refused.value.field == "some.field"


@given(identities)
def test_identity(value: WorkerIdentity) -> None:
    assert convert.identity_from_proto(_wire(convert.identity_to_proto(value))) == value


@given(layouts)
def test_layout(value: KvLayout) -> None:
    assert convert.layout_from_proto(_wire(convert.layout_to_proto(value))) == value


@given(models)
def test_model(value: ModelDescription) -> None:
    assert convert.model_from_proto(_wire(convert.model_to_proto(value))) == value


@given(samplings)
def test_sampling(value: SamplingParams) -> None:
    assert convert.sampling_from_proto(_wire(convert.sampling_to_proto(value))) == value


@given(stops)
def test_stop(value: StopParams) -> None:
    assert convert.stop_from_proto(_wire(convert.stop_to_proto(value))) == value


@given(attempts())
def test_attempt(value: Attempt) -> None:
    assert convert.attempt_from_proto(_wire(convert.attempt_to_proto(value))) == value


@given(choice_tokens())
def test_choice_tokens(value: ChoiceTokens) -> None:
    assert convert.choice_tokens_from_proto(_wire(convert.choice_tokens_to_proto(value))) == value


@given(st.sampled_from(Reason), name, name, st.none() | st.integers(1, 2**32 - 1))
def test_error(reason: Reason, message: str, field: str, after_ms: int | None) -> None:
    after_s = None if after_ms is None else after_ms / 1000
    sent = from_reason(reason, message, field=field, retry_after_s=after_s)
    got = convert.error_from_proto(_wire(convert.error_to_proto(sent)))
    assert type(got) is type(sent)
    assert (got.message, got.field, got.retry_after_s) == (message, field, after_s)


def test_absent_is_the_default_and_differs_from_zero() -> None:
    assert convert.sampling_from_proto(pb.SamplingParams()) == SamplingParams()
    zero = pb.SamplingParams(temperature=0.0, top_p=0.0, top_logprobs=0)
    got = convert.sampling_from_proto(zero)
    assert (got.temperature, got.top_p, got.top_logprobs) == (0.0, 0.0, 0)
    assert got.repetition_penalty == 1.0


def test_an_error_of_a_newer_version_is_still_an_error() -> None:
    for value in (0, 77):
        message = pb.Error(message="new")
        message.MergeFromString(bytes([0x08, value]))
        got = convert.error_from_proto(message)
        assert (got.reason, got.message) == (Reason.INTERNAL, "new")


@pytest.mark.parametrize(("seconds", "ms"), [(-1.0, 1), (0.0, 1), (0.0001, 1), (1.0, 1000)])
def test_little_time_left_is_not_no_deadline(seconds: float, ms: int) -> None:
    assert convert.to_ms(seconds) == ms


def test_much_time_left_fits() -> None:
    assert convert.to_ms(1e12) == 2**32 - 1


def _attempt(**changes: Any) -> pb.Attempt:
    message = pb.Attempt(
        request_id="r",
        choices=[0],
        token_ids=convert.token_ids_to_bytes([1, 2]),
        num_prompt_tokens=1,
        stop=pb.StopParams(max_tokens=4),
    )
    for field in changes:
        message.ClearField(field)  # type: ignore[arg-type]
    message.MergeFrom(pb.Attempt(**changes))
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "attempt.request_id"),
        ({"weight": 1e-4}, "attempt.weight"),
        ({"weight": -1.0}, "attempt.weight"),
        ({"weight": float("inf")}, "attempt.weight"),
        ({"weight": float("nan")}, "attempt.weight"),
        ({"choices": []}, "attempt.choices"),
        ({"choices": [1, 1]}, "attempt.choices"),
        ({"token_ids": b""}, "attempt.token_ids"),
        ({"token_ids": b"12345"}, "attempt.token_ids"),
        ({"token_ids": b"\xff" * 8}, "attempt.token_ids"),
        ({"num_prompt_tokens": 0}, "attempt.num_prompt_tokens"),
        ({"num_prompt_tokens": 3}, "attempt.num_prompt_tokens"),
        ({"stop": pb.StopParams()}, "attempt.stop.max_tokens"),
        ({"sampling": pb.SamplingParams(temperature=math.nan)}, "attempt.sampling.temperature"),
        ({"sampling": pb.SamplingParams(top_p=math.inf)}, "attempt.sampling.top_p"),
        ({"sampling": pb.SamplingParams(min_p=-math.inf)}, "attempt.sampling.min_p"),
        (
            {"sampling": pb.SamplingParams(logit_bias=[pb.LogitBias(bias=math.nan)])},
            "attempt.sampling.logit_bias",
        ),
    ],
)
def test_attempt_refused(changes: dict[str, Any], field: str) -> None:
    assert convert.attempt_from_proto(_attempt()).token_ids == (1, 2)
    with pytest.raises(InvalidArgument) as refused:
        convert.attempt_from_proto(_attempt(**changes))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.KvLayout(dtype=""), "layout.dtype"),
        (pb.KvLayout(dtype="float32"), "layout.num_layers"),
        (pb.KvLayout(dtype="float32", num_layers=1), "layout.num_kv_heads"),
        (pb.KvLayout(dtype="float32", num_layers=1, num_kv_heads=1), "layout.key_size"),
        (
            pb.KvLayout(
                dtype="float32", num_layers=1, num_kv_heads=1, key_size=1, min_wire_version=1
            ),
            "layout.min_wire_version",
        ),
    ],
)
def test_layout_refused(message: pb.KvLayout, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        convert.layout_from_proto(message)
    assert refused.value.field == field


def test_choice_tokens_refused() -> None:
    uneven = pb.ChoiceTokens(token_ids=bytes(8), logprobs=[pb.TokenLogprobs()])
    with pytest.raises(InvalidArgument) as refused:
        convert.choice_tokens_from_proto(uneven)
    assert refused.value.field == "tokens.logprobs"

    unknown = pb.ChoiceTokens()
    unknown.MergeFromString(bytes([7 << 3, 99]))
    with pytest.raises(InvalidArgument) as refused:
        convert.choice_tokens_from_proto(unknown, "frame.tokens")
    assert refused.value.field == "frame.tokens.finish_reason"


def _wire(message: Any) -> Any:
    """What the other process parses."""
    return type(message).FromString(message.SerializeToString())
