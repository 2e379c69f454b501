"""Reasoning in answers: where it begins and ends, and how its tokens are counted."""

from __future__ import annotations

import pytest

from batonlm.core.request.answers import AnswerDeltas, CallIds
from batonlm.core.request.formats.families import REASONING_FORMATS, TOOL_FORMATS, left_open
from batonlm.core.request.formats.reader import AnswerParts
from batonlm.core.request.request import ChatPrompt, Delta, FinishReason, Message
from tests.core.answer_reading import TOOLS, read

THINK = REASONING_FORMATS["think"]


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n\n</think>\n\nYes.\n", "hm", "Yes.\n"),
        (False, "\n<think>hm</think>Yes", "hm", "Yes"),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, "Yes. <think>hm</think>", "", "Yes. <think>hm</think>"),
        (False, "<think>cut o", "cut o", ""),
        (False, "<think>a\n\nb < c</thin", "a\n\nb < c</thin", ""),
        (True, "hm\n</think>\nYes", "hm", "Yes"),
        (True, "never ends\n", "never ends\n", ""),
        (False, "", "", ""),
    ],
)
def test_reasoning_is_told_apart(opened: bool, text: str, reasoning: str, content: str) -> None:
    reader = THINK.reader(opened, None)
    for pieces in ([text], list(text)):
        found = read(pieces, reader, tools={})
        assert (found.reasoning, found.content) == (reasoning, content)


def test_calls_follow_reasoning() -> None:
    text = '<think>\nI call.\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>'
    found = read(list(text), THINK.reader(False, None), TOOL_FORMATS["hermes"].read)
    assert found == ("", "I call.", [("f", "{}")], True)


@pytest.mark.parametrize(
    ("rendered", "final", "expected"),
    [
        ("<|assistant|><think>\n", None, True),
        ("<|assistant|><think>\n\n</think>\n\n", None, False),
        ("what is <think>?<|assistant|>", None, False),
        ("[THINK]", None, True),
        ("<|assistant|><think>I", "<think>I", True),
        ("<|assistant|><think>I</think>So", "<think>I</think>So", False),
    ],
)
def test_a_prompt_may_end_within_reasoning(
    rendered: str, final: str | None, expected: bool
) -> None:
    role = "user" if final is None else "assistant"
    messages = (Message(role, final or "hi"),)
    chat = ChatPrompt(messages, continue_final_message=final is not None)
    assert left_open(rendered, chat) is expected


CALL_OF_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("tools", "reasoning", "text", "expected"),
    [
        ("hermes", "think", "<tool_call>{}", ("", "<tool_call>{}", 0)),
        ("hermes", "think", "a <tool_call></think>b", ("b", "a <tool_call>", 0)),
        ("kimi_k2", "think", f"hm{CALL_OF_KIMI}", ("", "hm", 1)),
        ("kimi_k2", "think", f"hm</think>{CALL_OF_KIMI}", ("", "hm", 1)),
        ("gemma4", "gemma4", "\nhm\n<channel|>So.", ("So.", "hm", 0)),
        ("granite", "granite", "\n\nhm\n\nHere is my response:\n\nSo.", ("So.", "hm", 0)),
    ],
)
def test_calls_within_reasoning(
    tools: str, reasoning: str, text: str, expected: tuple[str, str, int]
) -> None:
    """They are reasoning, but for a marker of Kimi's that ends it."""
    form = TOOL_FORMATS[tools]
    readers = (REASONING_FORMATS[reasoning].reader(True, form), form.read)
    for pieces in ([text], list(text)):
        found = read(pieces, *readers)
        assert (found.content, found.reasoning, len(found.calls)) == expected


def test_harmony_is_told_apart_without_tools() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "well<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>."
    )
    reader = REASONING_FORMATS["harmony"].reader(False, None)
    for pieces in ([text], list(text)):
        found = read(pieces, reader, tools={})
        assert (found.content, found.reasoning) == ("Yes <b>.", "hm\nwell")


def deltas(end: int | None) -> AnswerDeltas:
    readers = (THINK.reader(False, None), TOOL_FORMATS["hermes"].read)
    return AnswerDeltas(AnswerParts(readers, TOOLS, str), calls_finish=True, reasoning_end=end)


@pytest.mark.parametrize("end", [None, 9])
@pytest.mark.parametrize("per_delta", [1, 3])
def test_tokens_of_reasoning_are_counted(end: int | None, per_delta: int) -> None:
    """With a token that ends it exactly, else up to the delta that does."""
    texts = ["<think>", "a", "b", "</think>", "c", "d"]
    ids = [8, 1, 2, 9, 3, 4]
    one = deltas(end)
    for at in range(0, 6, per_delta):
        one.of(Delta(0, "".join(texts[at : at + per_delta]), ids[at : at + per_delta]))
    assert one.reasoning_tokens == (4 if end or per_delta == 1 else 6)


def test_no_reasoning_no_tokens_of_it() -> None:
    one = deltas(9)
    one.of(Delta(0, "yes", [1, 9, 2]))
    assert one.reasoning_tokens == 0


CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        (CALL, FinishReason.STOP, None, FinishReason.TOOL_CALLS),
        (CALL, FinishReason.STOP, "</", FinishReason.STOP),
        (CALL, FinishReason.LENGTH, None, FinishReason.LENGTH),
        ("no call", FinishReason.STOP, None, FinishReason.STOP),
        (CALL[:-14], FinishReason.STOP, None, FinishReason.STOP),
    ],
)
def test_an_answer_ends_in_calls_when_it_is_whole(
    text: str, reason: FinishReason, stop: str | None, expected: FinishReason
) -> None:
    last = Delta(0, text, finish_reason=reason, stop_string=stop)
    assert deltas(None).of(last).finish_reason is expected


def test_ids_of_calls_repeat_with_the_request_and_differ_otherwise() -> None:
    made = [
        CallIds(prompt, seed, 29).of(choice, index)
        for prompt in ([1], [1, 2])
        for seed in (0, 1)
        for choice in (0, 1)
        for index in (0, 1)
    ]
    assert len(set(made)) == 16 and made[0] == CallIds([1], 0, 29).of(0, 0)
    assert all(len(each) == 29 and each.startswith("call_") for each in made)
    short = CallIds([1], 0, 9).of(0, 0)
    assert len(short) == 9 and short.isalnum()
