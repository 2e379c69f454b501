"""Readers of values: JSON, which is passed on unchanged, and literals of Python and Gemma, which
become JSON as they are read. Nothing is evaluated.

Each reader raises Malformed at the first invalid character; the text before it has been passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batonlm.core.request.formats.reader import (
    SPACE,
    AnswerText,
    Emit,
    Malformed,
    Reading,
)

MAX_DEPTH = 64
"""Most nesting levels of a value."""

MAX_WORD = 512
"""Most characters of a number or another word."""

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACES = re.compile(f"[{SPACE}]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_HEX = "0123456789abcdefABCDEF"

ValueReader = Callable[[AnswerText, Emit], Reading[None]]
"""Reads one value and emits it as JSON."""


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    char = yield from text.peek()
    if char == '"':
        yield from _string(text, emit)
    elif char in ("{", "["):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _container(text, emit, "}" if char == "{" else "]", depth)
    else:
        word = yield from text.word(_WORD, MAX_WORD)
        emit(word)
        if not _SCALAR.fullmatch(word):
            raise Malformed


def _string(text: AnswerText, emit: Emit) -> Reading[None]:
    """Reads a string with its quotes."""
    yield from text.expect('"')
    emit('"')
    while True:
        char = yield from text.peek()
        if char == "\\":
            emit(text.step())
            yield from _json_escape(text, emit)
        elif char == '"':
            emit(text.step())
            return
        elif run := text.run(_PLAIN):
            emit(run)
        else:
            raise Malformed


def _spaces(text: AnswerText, emit: Emit) -> Reading[None]:
    while (yield from text.peek()) and (run := text.run(_SPACES)):
        emit(run)


def _container(text: AnswerText, emit: Emit, closing: str, depth: int) -> Reading[None]:
    emit(text.step())
    yield from _spaces(text, emit)
    if (yield from text.peek()) == closing:
        emit(text.step())
        return
    while True:
        if closing == "}":
            yield from _string(text, emit)
            yield from _spaces(text, emit)
            yield from text.expect(":")
            emit(":")
            yield from _spaces(text, emit)
        yield from json_value(text, emit, depth + 1)
        yield from _spaces(text, emit)
        char = yield from text.peek()
        if char not in (",", closing):
            raise Malformed
        emit(text.step())
        if char == closing:
            return
        yield from _spaces(text, emit)


def _json_escape(text: AnswerText, emit: Emit) -> Reading[None]:
    char = yield from text.peek()
    if not char or char not in '"\\/bfnrtu':
        raise Malformed
    emit(text.step())
    for _ in range(4 if char == "u" else 0):
        digit = yield from text.peek()
        if not digit or digit not in _HEX:
            raise Malformed
        emit(text.step())


def string_value(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from _string(text, raw.append)
    decoded: str = json.loads("".join(raw))
    return decoded


def whole_value(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from json_value(text, raw.append)
    return "".join(raw)


# Python. The words and strings of JSON are accepted, too.

_PY_WORD = re.compile(r"[-+.\w]+", re.ASCII)
_PY_PLAIN: Mapping[str, re.Pattern[str]] = {
    quote: re.compile(rf'[^\\"{quote}\x00-\x1f]+') for quote in "\"'"
}
_PY_WORDS = {"True": "true", "False": "false", "None": "null"}
_SAME_ESCAPES = '"\\/bfnrt'
_OTHER_ESCAPES = {"'": "'", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
_PY_HEX = re.compile(r"[0-9a-fA-F]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PY_CLOSING = {"[": "]", "(": ")", "{": "}"}


def python_value(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    char = yield from text.peek()
    if char in ("'", '"'):
        yield from _py_string(text, emit)
    elif char in ("[", "(", "{"):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _py_collection(text, emit, _PY_CLOSING[text.step()], depth)
    else:
        yield from _py_scalar(text, emit)


def _py_scalar(text: AnswerText, emit: Emit) -> Reading[None]:
    word = yield from text.word(_PY_WORD, MAX_WORD)
    written = _PY_WORDS.get(word, word)
    if not _SCALAR.fullmatch(written):
        raise Malformed(word)
    emit(written)


def _py_collection(text: AnswerText, emit: Emit, closing: str, depth: int) -> Reading[None]:
    """Reads a collection. A tuple becomes a list; keys must be strings."""
    keyed = closing == "}"
    emit("{" if keyed else "[")
    separator = ""
    yield from text.skip()
    while (yield from text.peek()) != closing:
        emit(separator)
        separator = ", "
        if keyed:
            yield from _py_string(text, emit)
            yield from text.skip()
            yield from text.expect(":")
            emit(": ")
            yield from text.skip()
        yield from python_value(text, emit, depth + 1)
        yield from text.skip()
        if not (yield from text.follows(",")):
            break
        yield from text.skip()
    yield from text.expect(closing)
    emit("}" if keyed else "]")


def _py_string(text: AnswerText, emit: Emit) -> Reading[None]:
    quote = yield from text.peek()
    if quote not in ("'", '"'):
        raise Malformed
    text.step()
    emit('"')
    while True:
        char = yield from text.peek()
        if not char or char in "\r\n":
            raise Malformed
        if run := text.run(_PY_PLAIN[quote]):
            emit(run)
            continue
        text.step()
        if char == quote:
            emit('"')
            return
        if char == "\\":
            yield from _py_escape(text, emit)
        else:
            emit(json.dumps(char)[1:-1])


def _py_escape(text: AnswerText, emit: Emit) -> Reading[None]:
    char = yield from text.peek()
    if not char:
        raise Malformed("\\")
    text.step()
    if char in _SAME_ESCAPES:
        emit("\\" + char)
    elif char in _OTHER_ESCAPES:
        emit(_OTHER_ESCAPES[char])
    elif char in _HEX_DIGITS:
        emit((yield from _code_point(text, char)))
    else:  # Python keeps the backslash of an escape that it does not know
        emit("\\\\" + json.dumps(char, ensure_ascii=False)[1:-1])


def _code_point(text: AnswerText, kind: str) -> Reading[str]:
    digits = yield from text.word(_PY_HEX, _HEX_DIGITS[kind])
    if len(digits) < _HEX_DIGITS[kind] or int(digits, 16) > 0x10FFFF:
        raise Malformed(f"\\{kind}{digits}")
    return json.dumps(chr(int(digits, 16)))[1:-1]


# Gemma: {key:value,…} with bare keys, and strings between two quotes that cannot be in a string.

BARE_KEY = re.compile(r"[\w$.-]+")
MAX_KEY = 256
"""Most characters of a key."""


@dataclass(frozen=True, slots=True)
class QuotedValues:
    """Reads values whose strings stand between two of one quote, without escapes."""

    quote: str

    def value(self, text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
        char = yield from text.peek()
        if (yield from text.follows(self.quote)):
            yield from self._string(text, emit)
        elif char in ("{", "["):
            if depth == MAX_DEPTH:
                raise Malformed
            yield from self._container(text, emit, _PY_CLOSING[text.step()], depth)
        else:
            yield from _py_scalar(text, emit)

    def _string(self, text: AnswerText, emit: Emit) -> Reading[None]:
        emit('"')
        if not (yield from text.until((self.quote,), lambda part: emit(escaped(part)))):
            raise Malformed
        emit('"')

    def _container(self, text: AnswerText, emit: Emit, closing: str, depth: int) -> Reading[None]:
        emit("{" if closing == "}" else "[")
        separator = ""
        yield from text.skip()
        while (yield from text.peek()) != closing:
            emit(separator)
            separator = ", "
            if closing == "}":
                yield from self._key(text, emit)
            yield from self.value(text, emit, depth + 1)
            yield from text.skip()
            if not (yield from text.follows(",")):
                break
            yield from text.skip()
        yield from text.expect(closing)
        emit(closing)

    def _key(self, text: AnswerText, emit: Emit) -> Reading[None]:
        if (yield from text.follows(self.quote)):
            yield from self._string(text, emit)
        else:
            key = yield from text.word(BARE_KEY, MAX_KEY)
            if not key:
                raise Malformed
            emit(f'"{escaped(key)}"')
        yield from text.skip()
        yield from text.expect(":")
        emit(": ")
        yield from text.skip()
