"""Reads JSON as it comes and passes it on as it is."""

from __future__ import annotations

import json
import re

from baton.core.request.answer_parts import AnswerParts
from baton.core.request.answer_text import SPACE, AnswerText, Emit, Malformed, Reading

MAX_DEPTH = 64
MAX_WORD = 512

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACES = re.compile(f"[{SPACE}]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = "0123456789abcdefABCDEF"

ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")


def value(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    """Any value. Raises Malformed at the first character that cannot be; what came before it has
    been passed on."""
    char = yield from text.peek()
    if char == '"':
        yield from string(text, emit)
    elif char in ("{", "["):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _container(text, emit, "}" if char == "{" else "]", depth)
    else:
        word = yield from text.word(_WORD, MAX_WORD)
        emit(word)
        if not SCALAR.fullmatch(word):
            raise Malformed


def string(text: AnswerText, emit: Emit) -> Reading[None]:
    """A string with its quotes."""
    yield from text.expect('"')
    emit('"')
    while True:
        char = yield from text.peek()
        if char == "\\":
            emit(text.step())
            yield from _escape(text, emit)
        elif char == '"':
            emit(text.step())
            return
        elif run := text.run(_PLAIN):
            emit(run)
        else:
            raise Malformed


def spaces(text: AnswerText, emit: Emit) -> Reading[None]:
    while (yield from text.peek()) and (run := text.run(_SPACES)):
        emit(run)


def call_object(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    """A call as an object with its name and, in whatever order, its arguments."""
    name, early, told = "", "", False
    yield from text.skip()
    yield from text.expect("{")
    while True:
        yield from text.skip()
        key = yield from _text(text)
        yield from text.skip()
        yield from text.expect(":")
        yield from text.skip()
        if told:
            yield from value(text, _leave_out)
        elif key == "name" and not name:
            name = yield from _text(text)
            if early:
                answer.open_call(name)
                answer.arguments(early)
                told = True
        elif key in ARGUMENTS and not early:
            if (yield from text.peek()) != "{":
                raise Malformed
            if name:
                answer.open_call(name)
                yield from value(text, answer.arguments)
                told = True
            else:
                early = yield from _whole(text)
        elif key in _IGNORED:
            yield from _text(text)
        else:
            raise Malformed
        yield from text.skip()
        if (yield from text.follows("}")):
            break
        yield from text.expect(",")
    if not told:
        answer.open_call(name)
        answer.arguments("{}")
    answer.close_call()


def _leave_out(_: str) -> None:
    """What a call says besides."""


def _text(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from string(text, raw.append)
    decoded: str = json.loads("".join(raw))
    return decoded


def _whole(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from value(text, raw.append)
    return "".join(raw)


def _container(text: AnswerText, emit: Emit, closing: str, depth: int) -> Reading[None]:
    emit(text.step())
    yield from spaces(text, emit)
    if (yield from text.peek()) == closing:
        emit(text.step())
        return
    while True:
        if closing == "}":
            yield from string(text, emit)
            yield from spaces(text, emit)
            yield from text.expect(":")
            emit(":")
            yield from spaces(text, emit)
        yield from value(text, emit, depth + 1)
        yield from spaces(text, emit)
        char = yield from text.peek()
        if char not in (",", closing):
            raise Malformed
        emit(text.step())
        if char == closing:
            return
        yield from spaces(text, emit)


def _escape(text: AnswerText, emit: Emit) -> Reading[None]:
    char = yield from text.peek()
    if not char or char not in '"\\/bfnrtu':
        raise Malformed
    emit(text.step())
    for _ in range(4 if char == "u" else 0):
        digit = yield from text.peek()
        if not digit or digit not in _HEX:
            raise Malformed
        emit(text.step())
