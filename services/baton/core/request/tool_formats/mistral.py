"""Calls as Mistral writes them: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and newer ones
`[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from baton.core.request.answer_parts import AnswerParts, attempt, attempt_list
from baton.core.request.answer_text import AnswerText, Malformed, Reading
from baton.core.request.lark import Lark
from baton.core.request.request import Tool
from baton.core.request.tool_formats.json_text import call_object, value
from baton.core.request.tool_formats.parameters import arguments, call_objects, one_of, several

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_MAX_NAME = 64


def read(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    while (yield from text.until((BEGIN,), answer.content)):
        text.keep()
        yield from text.skip()
        listed = (yield from text.peek()) == "["
        text.rewind()
        if listed:
            following = partial(call_object, text, answer)
            yield from attempt_list(text, answer, BEGIN, _first(text, answer), following)
        else:
            yield from attempt(text, answer, BEGIN, _named(text, answer))


def _first(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    yield from text.expect("[")
    yield from call_object(text, answer)


def _named(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    name = yield from text.word(_NAME, _MAX_NAME)
    if (yield from text.follows(CALL_ID)):
        yield from text.word(_NAME, _MAX_NAME)
    yield from text.follows(ARGS)
    yield from text.skip()
    if (yield from text.peek()) != "{":
        raise Malformed
    answer.open_call(name)
    yield from value(text, answer.arguments)
    answer.close_call()


def calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    if not lark.is_token(ARGS):
        call = call_objects(lark, tools, "arguments")
        return '"[" ' + several(call, f'", " {call}', parallel) + ' "]"'
    named = (
        f"{lark.literal(tool.name)} {lark.marker(ARGS)} {arguments(lark, tool)}" for tool in tools
    )
    call = one_of(lark, named)
    return several(call, f"{lark.marker(BEGIN)} {call}", parallel)
