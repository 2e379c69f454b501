"""A chunk that is only text is the same whether it is put together from bytes or encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.request.request import Accepted, Delta, FinishReason, TextLogprob, TokenLogprobs
from batonlm.router.api.http.answers import AnswerWriter, ChatAnswer, CompletionAnswer
from batonlm.router.api.http.generation import PlainChunks
from batonlm.router.api.http.parse import parse_chat, parse_completion
from batonlm.router.api.http.responses import Json, encode

ACCEPTED = [Accepted(f"r{prompt}", 'a "model"', 3, 7, ()) for prompt in range(2)]


def _completion() -> AnswerWriter:
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "stream": True}
    return CompletionAnswer(parse_completion(msgspec.json.encode(body)), ACCEPTED, 5)


def _chat() -> AnswerWriter:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "n": 2, "stream": True}
    return ChatAnswer(parse_chat(msgspec.json.encode(body)), ACCEPTED[:1], 5)


def _with_usage(chunks: list[Json]) -> list[Json]:
    return [chunk | {"usage": None} for chunk in chunks]


@pytest.mark.parametrize("answer", [_completion, _chat])
@pytest.mark.parametrize("dress", [list, _with_usage])
@given(
    deltas=st.lists(
        st.builds(
            Delta,
            choice=st.integers(0, 1),
            text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
            | st.sampled_from(['"', "\\", "\n", "\ue000text\ue001", "\u2028", "🏃"]),
            token_ids=st.just((1, 2)),
        ),
        max_size=4,
    )
)
def test_equal_bytes(
    answer: Callable[[], AnswerWriter],
    dress: Callable[[list[Json]], list[Json]],
    deltas: list[Delta],
) -> None:
    made, other = answer(), answer()
    plain = PlainChunks(lambda delta: dress(made.chunks(0, delta)))
    for delta in deltas:
        (chunk,) = dress(other.chunks(0, delta))
        assert plain.event(delta) == b"data: " + encode(chunk) + b"\n\n"


@pytest.mark.parametrize(
    "more",
    [
        {"text": ""},
        {"finish_reason": FinishReason.STOP},
        {"stop_string": "x"},
        {"stop_token_id": 0},
        {"logprobs": (TokenLogprobs(TextLogprob(1, b"a", -1.0), ()),)},
    ],
)
def test_what_says_more_or_nothing_is_not_only_text(more: Json) -> None:
    answer = _chat()
    plain = PlainChunks(lambda delta: answer.chunks(0, delta))
    assert plain.event(Delta(0, "a", (1,))) is not None
    assert plain.event(replace(Delta(0, "a", (1,)), **more)) is None
