"""Calls as a list of Python calls, `[f(a=1), g(b="x")]`, which is the whole answer.

Arguments are literals, written down as JSON while they are read: nothing is evaluated. JSON's own
words and strings are taken too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial

from baton.core.errors import InvalidArgument
from baton.core.request.answer_parts import AnswerParts, attempt_list
from baton.core.request.answer_text import AnswerText, Emit, Malformed, Reading
from baton.core.request.lark import Lark
from baton.core.request.request import Tool
from baton.core.request.tool_formats.json_text import MAX_DEPTH, MAX_WORD, SCALAR
from baton.core.request.tool_formats.parameters import one_of, schema_of, several

TAG = "<|python_tag|>"

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_MAX_NAME = 64
_KEYWORD = re.compile(r"\w+")
_WORD = re.compile(r"[-+.\w]+", re.ASCII)
_PLAIN: Mapping[str, re.Pattern[str]] = {
    quote: re.compile(rf'[^\\"{quote}\x00-\x1f]+') for quote in "\"'"
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_SAME = '"\\/bfnrt'
_OTHER = {"'": "'", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
_HEX = re.compile(r"[0-9a-fA-F]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    following = partial(_call, text, answer)
    yield from attempt_list(text, answer, "", _first(text, answer), following)


def _first(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    if (yield from text.follows(TAG)):
        yield from text.skip()
    yield from text.expect("[")
    yield from _call(text, answer)


def _call(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    name = yield from text.word(_NAME, _MAX_NAME)
    yield from text.expect("(")
    answer.open_call(name)
    answer.arguments("{")
    separator = ""
    yield from text.skip()
    while (yield from text.peek()) != ")":
        keyword = yield from text.word(_KEYWORD, _MAX_NAME)
        yield from text.skip()
        if not keyword.isidentifier() or not (yield from text.follows("=")):
            raise Malformed(keyword)
        yield from text.skip()
        answer.arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
        separator = ", "
        yield from _literal(text, answer.arguments)
        yield from text.skip()
        if not (yield from text.follows(",")):
            break
        yield from text.skip()
    yield from text.expect(")")
    answer.arguments("}")
    answer.close_call()


def _literal(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    char = yield from text.peek()
    if char in ("'", '"'):
        yield from _string(text, emit)
    elif char in ("[", "(", "{"):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _collection(text, emit, _CLOSING[text.step()], depth)
    else:
        word = yield from text.word(_WORD, MAX_WORD)
        written = _WORDS.get(word, word)
        if not SCALAR.fullmatch(written):
            raise Malformed(word)
        emit(written)


def _collection(text: AnswerText, emit: Emit, closing: str, depth: int) -> Reading[None]:
    """A tuple is a list to JSON; keys are strings."""
    keyed = closing == "}"
    emit("{" if keyed else "[")
    separator = ""
    yield from text.skip()
    while (yield from text.peek()) != closing:
        emit(separator)
        separator = ", "
        if keyed:
            yield from _string(text, emit)
            yield from text.skip()
            yield from text.expect(":")
            emit(": ")
            yield from text.skip()
        yield from _literal(text, emit, depth + 1)
        yield from text.skip()
        if not (yield from text.follows(",")):
            break
        yield from text.skip()
    yield from text.expect(closing)
    emit("}" if keyed else "]")


def _string(text: AnswerText, emit: Emit) -> Reading[None]:
    quote = yield from text.peek()
    if quote not in ("'", '"'):
        raise Malformed
    text.step()
    emit('"')
    while True:
        char = yield from text.peek()
        if not char or char in "\r\n":
            raise Malformed
        if run := text.run(_PLAIN[quote]):
            emit(run)
            continue
        text.step()
        if char == quote:
            emit('"')
            return
        if char == "\\":
            yield from _escape(text, emit)
        else:
            emit(json.dumps(char)[1:-1])


def _escape(text: AnswerText, emit: Emit) -> Reading[None]:
    char = yield from text.peek()
    if not char:
        raise Malformed("\\")
    text.step()
    if char in _SAME:
        emit("\\" + char)
    elif char in _OTHER:
        emit(_OTHER[char])
    elif char in _HEX_DIGITS:
        emit((yield from _code_point(text, char)))
    else:  # Python keeps the backslash of an escape that it does not know
        emit("\\\\" + json.dumps(char, ensure_ascii=False)[1:-1])


def _code_point(text: AnswerText, kind: str) -> Reading[str]:
    digits = yield from text.word(_HEX, _HEX_DIGITS[kind])
    if len(digits) < _HEX_DIGITS[kind] or int(digits, 16) > 0x10FFFF:
        raise Malformed(f"\\{kind}{digits}")
    return json.dumps(chr(int(digits, 16)))[1:-1]


def calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = one_of(lark, [f'{lark.literal(f"{t.name}(")} {_keywords(lark, t)} ")"' for t in tools])
    return '"[" ' + several(call, f'", " {call}', parallel) + ' "]"'


def _keywords(lark: Lark, tool: Tool) -> str:
    """The properties in their order, values as JSON. Raises InvalidArgument (`tools`) for one that
    cannot be the name of a parameter."""
    schema = schema_of(tool)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", ())
    first, rest = '""', '""'
    for name, of in reversed(schema.get("properties", {}).items()):
        if not name.isidentifier():
            raise InvalidArgument(
                "tools has a parameter that this model's format of calls cannot name", field="tools"
            )
        of = of if isinstance(of, dict) else {}
        one = lark.rule(f"{lark.literal(f'{name}=')} {lark.schema({**of, **shared})}")
        if name in required:
            first, rest = f"{one} {rest}", lark.rule(f'", " {one} {rest}')
        else:
            first, rest = (
                lark.rule(f"{one} {rest} | {first}"),
                lark.rule(f'", " {one} {rest} | {rest}'),
            )
    return first
