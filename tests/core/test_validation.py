"""The validator: every bound from both sides, by table; and that what passes is bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import (
    ChatPrompt,
    Message,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from batonlm.core.request.validation import (
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    REQUEST_RANGES,
    SAMPLING_RANGES,
    validate,
)

GOOD = Request(prompt=TextPrompt("hello"))
USER = Message("user", "hello")


def refused(request: Request) -> str:
    with pytest.raises(InvalidArgument) as caught:
        validate(request)
    assert caught.value.message.startswith(caught.value.field)
    return caught.value.field


def sampled(**fields: Any) -> Request:
    return replace(GOOD, sampling=SamplingParams(**fields))


def chat(*messages: Message, **fields: Any) -> Request:
    return Request(prompt=ChatPrompt(messages, **fields))


def test_a_plain_request_passes_as_it_is() -> None:
    assert validate(GOOD) is GOOD


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("temperature", [0.0, 0.7, 2.0], [-1.0, -1e-9, 2.01]),
        ("top_p", [1e-6, 1.0], [0.0, 1.1, -0.5]),
        ("top_k", [0, 1, 50_000], [-1, 2**31]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 10.0], [0.0, -1.0, 10.1]),
        ("top_logprobs", [None, 0, 20], [-1, 21]),
    ],
)
def test_sampling_ranges(field: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        validate(sampled(**{field: value}))
    for value in outside:
        assert refused(sampled(**{field: value})) == field


@pytest.mark.parametrize("field", sorted(SAMPLING_RANGES.keys() - {"top_k", "top_logprobs"}))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(field: str, value: float) -> None:
    assert refused(sampled(**{field: value})) == field


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("n", [1, 16], [0, 17, 10_000, -1]),
        ("max_tokens", [None, 1, 2**31 - 1], [0, -5, 2**31]),
        ("min_tokens", [0, 7], [-1, 2**31]),
        ("seed", [None, 0, 2**64 - 1], [-1, 2**64]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("truncate_prompt_tokens", [None, -1, 1, 2**31 - 1], [0, -2, 2**31]),
        ("truncation_side", ["left", "right"], ["", "both"]),
        ("priority", [-(2**31), 0, 2**31 - 1], [2**31, -(2**31) - 1]),
        ("deadline_s", [None, 0.5], [0.0, -1.0, math.nan, math.inf]),
    ],
)
def test_request_ranges(field: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        validate(replace(GOOD, **{field: value}))
    for value in outside:
        assert refused(replace(GOOD, **{field: value})) == field


def test_every_range_is_tested_above() -> None:
    assert SAMPLING_RANGES.keys() | REQUEST_RANGES.keys() == {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "top_logprobs"),
        *("n", "max_tokens", "min_tokens", "seed", "priority", "deadline_s"),
        *("prompt_logprobs", "truncate_prompt_tokens"),
    }


def test_nothing_is_generated_only_where_something_is_asked_of_the_prompt() -> None:
    validate(replace(GOOD, max_tokens=0, echo=True))
    validate(replace(GOOD, max_tokens=0, prompt_logprobs=0))
    assert refused(replace(GOOD, max_tokens=0)) == "max_tokens"


def test_min_tokens_may_equal_but_not_exceed_max_tokens() -> None:
    validate(replace(GOOD, min_tokens=5, max_tokens=5))
    assert refused(replace(GOOD, min_tokens=6, max_tokens=5)) == "min_tokens"


@pytest.mark.parametrize(
    "bias",
    [
        tuple((token, 0.0) for token in range(1025)),
        ((1, 100.5),),
        ((1, math.nan),),
        ((-1, 1.0),),
        ((2**31, 1.0),),
        ((7, 1.0), (7, 2.0)),
    ],
)
def test_logit_bias_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    assert refused(sampled(logit_bias=bias)) == "logit_bias"


def test_logit_bias_at_its_bounds_passes() -> None:
    validate(sampled(logit_bias=tuple((token, -100.0) for token in range(1024))))


@pytest.mark.parametrize("stops", [("x",) * 9, ("",), ("x" * 257,), ("é" * 129,), ("\ud800",)])
def test_stop_strings_are_refused(stops: tuple[str, ...]) -> None:
    assert refused(replace(GOOD, stop_strings=stops)) == "stop_strings"


def test_stop_strings_at_their_bounds_pass() -> None:
    validate(replace(GOOD, stop_strings=("é" * 128,) * 8))


@pytest.mark.parametrize("ids", [(1,) * 65, (-1,), (2**31,)])
def test_stop_token_ids_are_refused(ids: tuple[int, ...]) -> None:
    assert refused(replace(GOOD, stop_token_ids=ids)) == "stop_token_ids"


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(""),
        TextPrompt("x" * (MAX_PROMPT_BYTES + 1)),
        TextPrompt("é" * (MAX_PROMPT_BYTES // 2 + 1)),
        TextPrompt("\ud800"),
        TokenPrompt(()),
        TokenPrompt((1, -1)),
        TokenPrompt((2**31,)),
        TokenPrompt((1,) * (MAX_PROMPT_TOKENS + 1)),
    ],
)
def test_prompts_are_refused(prompt: Prompt) -> None:
    assert refused(Request(prompt=prompt)) == "prompt"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(), "messages"),
        (chat(*[USER] * 2049), "messages"),
        (chat(Message("user", "x" * 600_000), Message("user", "x" * 600_000)), "messages"),
        (chat(USER, Message("wizard", "x")), "messages[1].role"),
        (chat(Message("user", "\udfff")), "messages[0].content"),
        (chat(USER, continue_final_message=True), "continue_final_message"),
        (
            chat(USER, continue_final_message=True, add_generation_prompt=False),
            "continue_final_message",
        ),
    ],
)
def test_conversations_are_refused(request_: Request, field: str) -> None:
    assert refused(request_) == field


def test_conversations_pass() -> None:
    tool = Message("tool", "1", tool_call_id="c")
    validate(chat(Message("system", ""), USER, Message("assistant", "hi"), tool))
    validate(
        chat(
            USER,
            Message("assistant", "he"),
            continue_final_message=True,
            add_generation_prompt=False,
        )
    )


def test_names_and_salts_are_bounded() -> None:
    assert refused(replace(GOOD, model="m" * 257)) == "model"
    assert refused(replace(GOOD, cache_salt=b"s" * 1025)) == "cache_salt"


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(),
        top_p=st.floats(),
        top_k=st.integers(),
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        presence_penalty=st.floats(),
        frequency_penalty=st.floats(),
        logit_bias=st.lists(st.tuples(st.integers(), st.floats())).map(tuple),
        top_logprobs=st.none() | st.integers(),
    ),
    st.integers(),
)
def test_whatever_passes_is_within_every_range(sampling: SamplingParams, n: int) -> None:
    request = replace(GOOD, sampling=sampling, n=n)
    try:
        validate(request)
    except InvalidArgument as error:
        assert error.field in {"n", "logit_bias", *SAMPLING_RANGES}
    else:
        assert 1 <= n <= 16
        assert all(math.isfinite(getattr(sampling, f) or 0) for f in SAMPLING_RANGES)
        assert all(-100 <= bias <= 100 for _, bias in sampling.logit_bias)
