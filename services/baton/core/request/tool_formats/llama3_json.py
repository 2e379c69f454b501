"""Calls as Llama 3 writes them: an answer that is `{"name": …, "parameters": {…}}`, several of them
with `;` between, or such behind `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.answer_parts import AnswerParts, attempt
from baton.core.request.answer_text import AnswerText, Reading
from baton.core.request.lark import Lark
from baton.core.request.request import Tool
from baton.core.request.tool_formats.json_text import call_object
from baton.core.request.tool_formats.parameters import call_objects, several

TAG = "<|python_tag|>"


def read(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from _calls(text, answer, "")
    while (yield from text.until((TAG,), answer.content)):
        yield from _calls(text, answer, TAG)


def _calls(text: AnswerText, answer: AnswerParts, marker: str) -> Reading[None]:
    while (yield from attempt(text, answer, marker, call_object(text, answer))):
        marker = ";"
        yield from text.skip()
        if not (yield from text.follows(marker)):
            return


def calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = call_objects(lark, tools, "parameters")
    return several(call, f'"; " {call}', parallel)
