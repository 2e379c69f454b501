"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.answer_parts import AnswerParts, attempt
from baton.core.request.answer_text import AnswerText, Reading
from baton.core.request.lark import Lark
from baton.core.request.request import Tool
from baton.core.request.tool_formats.json_text import call_object
from baton.core.request.tool_formats.parameters import call_objects, several

BEGIN, END = "<tool_call>", "</tool_call>"


def read(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    while (yield from text.until((BEGIN,), answer.content)):
        if (yield from attempt(text, answer, BEGIN, call_object(text, answer))):
            yield from text.skip()
            yield from text.follows(END)


def calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.rule(f'"\\n" {call_objects(lark, tools, "arguments")} "\\n" {lark.marker(END)}')
    return several(call, f'"\\n" {lark.marker(BEGIN)} {call}', parallel)
