"""The formats in which models write reasoning and tool calls: how to read them and how to enforce
them.

A reader is a generator over an answer's text (`batonlm.core.request.answer_reader`). `calls` of a
format is a grammar expression (`batonlm.core.request.lark`) that matches nothing but calls.

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>
    llama3_json  {"name": …, "parameters": {…}}; {…}       or the same after <|python_tag|>
    mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
                 [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…    newer models
    pythonic     [f(a=1), g(b="x")]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.answer_reader import (
    SPACE,
    AnswerParts,
    AnswerText,
    Emit,
    Malformed,
    Reader,
    Reading,
    attempt,
    attempt_list,
)
from batonlm.core.request.lark import Lark, schema_of, several
from batonlm.core.request.request import ChatPrompt, Tool

MAX_DEPTH = 64
"""Most nesting levels of a call's arguments."""

MAX_WORD = 512
"""Most characters of a number or another word."""

MAX_NAME = 64
"""Most characters of the name of a tool or a parameter."""

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")

# JSON, passed on unchanged. Each reader raises Malformed at the first invalid character; the text
# before it has been passed on.

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACES = re.compile(f"[{SPACE}]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_HEX = "0123456789abcdefABCDEF"

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")
"""Keys of a call object that are ignored."""


def _value(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
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
        yield from _value(text, emit, depth + 1)
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


def _call_object(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    """Reads a call as an object with its name and its arguments in any order."""
    name, early, passed_on = "", "", False
    yield from text.skip()
    yield from text.expect("{")
    while True:
        yield from text.skip()
        key = yield from _string_value(text)
        yield from text.skip()
        yield from text.expect(":")
        yield from text.skip()
        if passed_on:
            yield from _value(text, lambda _: None)
        elif key == "name" and not name:
            name = yield from _string_value(text)
            if early:
                answer.open_call(name)
                answer.arguments(early)
                passed_on = True
        elif key in _ARGUMENTS and not early:
            if (yield from text.peek()) != "{":
                raise Malformed
            if name:
                answer.open_call(name)
                yield from _value(text, answer.arguments)
                passed_on = True
            else:
                early = yield from _whole(text)
        elif key in _IGNORED:
            yield from _string_value(text)
        else:
            raise Malformed
        yield from text.skip()
        if (yield from text.follows("}")):
            break
        yield from text.expect(",")
    if not passed_on:
        answer.open_call(name)
        answer.arguments("{}")
    answer.close_call()


def _string_value(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from _string(text, raw.append)
    decoded: str = json.loads("".join(raw))
    return decoded


def _whole(text: AnswerText) -> Reading[str]:
    raw: list[str] = []
    yield from _value(text, raw.append)
    return "".join(raw)


# Hermes and Qwen.

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


def _read_hermes(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    while (yield from text.until((TOOL_CALL,), answer.content)):
        if (yield from attempt(text, answer, TOOL_CALL, _call_object(text, answer))):
            yield from text.skip()
            yield from text.follows(END_TOOL_CALL)


def _hermes_calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.rule(
        f'"\\n" {lark.call_objects(tools, "arguments")} "\\n" {lark.marker(END_TOOL_CALL)}'
    )
    return several(call, f'"\\n" {lark.marker(TOOL_CALL)} {call}', parallel)


# Llama 3.

PYTHON_TAG = "<|python_tag|>"


def _read_llama3(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from _read_llama3_calls(text, answer, "")
    while (yield from text.until((PYTHON_TAG,), answer.content)):
        yield from _read_llama3_calls(text, answer, PYTHON_TAG)


def _read_llama3_calls(text: AnswerText, answer: AnswerParts, marker: str) -> Reading[None]:
    while (yield from attempt(text, answer, marker, _call_object(text, answer))):
        marker = ";"
        yield from text.skip()
        if not (yield from text.follows(marker)):
            return


def _llama3_calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.call_objects(tools, "parameters")
    return several(call, f'"; " {call}', parallel)


# Mistral.

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_mistral(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    while (yield from text.until((TOOL_CALLS,), answer.content)):
        text.keep()
        yield from text.skip()
        listed = (yield from text.peek()) == "["
        text.rewind()
        if listed:
            following = partial(_call_object, text, answer)
            yield from attempt_list(
                text, answer, TOOL_CALLS, _first_mistral(text, answer), following
            )
        else:
            yield from attempt(text, answer, TOOL_CALLS, _named_mistral(text, answer))


def _first_mistral(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    yield from text.expect("[")
    yield from _call_object(text, answer)


def _named_mistral(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    name = yield from text.word(_NAME, MAX_NAME)
    if (yield from text.follows(CALL_ID)):
        yield from text.word(_NAME, MAX_NAME)
    yield from text.follows(ARGS)
    yield from text.skip()
    if (yield from text.peek()) != "{":
        raise Malformed
    answer.open_call(name)
    yield from _value(text, answer.arguments)
    answer.close_call()


def _mistral_calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    if not lark.is_token(ARGS):
        call = lark.call_objects(tools, "arguments")
        return '"[" ' + several(call, f'", " {call}', parallel) + ' "]"'
    named = (
        f"{lark.literal(tool.name)} {lark.marker(ARGS)} {lark.arguments(tool)}" for tool in tools
    )
    call = lark.one_of(named)
    return several(call, f"{lark.marker(TOOL_CALLS)} {call}", parallel)


# Python literals, converted to JSON as they are read; nothing is evaluated. The words and strings
# of JSON are accepted too.

_KEYWORD = re.compile(r"\w+")
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


def _read_pythonic(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    following = partial(_read_call, text, answer)
    yield from attempt_list(text, answer, "", _first_pythonic(text, answer), following)


def _first_pythonic(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    if (yield from text.follows(PYTHON_TAG)):
        yield from text.skip()
    yield from text.expect("[")
    yield from _read_call(text, answer)


def _read_call(text: AnswerText, answer: AnswerParts) -> Reading[None]:
    yield from text.skip()
    name = yield from text.word(_NAME, MAX_NAME)
    yield from text.expect("(")
    answer.open_call(name)
    answer.arguments("{")
    separator = ""
    yield from text.skip()
    while (yield from text.peek()) != ")":
        keyword = yield from text.word(_KEYWORD, MAX_NAME)
        yield from text.skip()
        if not keyword.isidentifier() or not (yield from text.follows("=")):
            raise Malformed(keyword)
        yield from text.skip()
        answer.arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
        separator = ", "
        yield from _py_literal(text, answer.arguments)
        yield from text.skip()
        if not (yield from text.follows(",")):
            break
        yield from text.skip()
    yield from text.expect(")")
    answer.arguments("}")
    answer.close_call()


def _py_literal(text: AnswerText, emit: Emit, depth: int = 0) -> Reading[None]:
    char = yield from text.peek()
    if char in ("'", '"'):
        yield from _py_string(text, emit)
    elif char in ("[", "(", "{"):
        if depth == MAX_DEPTH:
            raise Malformed
        yield from _py_collection(text, emit, _PY_CLOSING[text.step()], depth)
    else:
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
        yield from _py_literal(text, emit, depth + 1)
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


def _pythonic_calls(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    call = lark.one_of([f'{lark.literal(f"{t.name}(")} {_keywords(lark, t)} ")"' for t in tools])
    return '"[" ' + several(call, f'", " {call}', parallel) + ' "]"'


def _keywords(lark: Lark, tool: Tool) -> str:
    """Matches the properties in their order, with values as JSON. Raises InvalidArgument (`tools`)
    for a property that cannot be a parameter name."""
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


DEFAULT = "hermes"
"""The format for a model whose template shows no tool format."""

CALL_ID_LENGTH = 29
MISTRAL_ID_LENGTH = 9
"""Mistral's chat templates refuse ids of any other length."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls."""

    read: Reader
    calls: Callable[[Lark, Sequence[Tool], bool], str]
    """Returns the grammar expression for calls of these tools, the first one after `begin`. The
    flag allows more than one call."""
    begin: str
    """The text that marks a first call anywhere in an answer. Empty when calls are the whole
    answer."""
    markers: tuple[str, ...]
    """Texts that may be special tokens."""
    opening: str = ""
    """The first character when calls are the whole answer."""
    id_length: int = CALL_ID_LENGTH
    """Characters of a call id."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        _read_hermes, _hermes_calls, begin=TOOL_CALL, markers=(TOOL_CALL, END_TOOL_CALL)
    ),
    "llama3_json": ToolFormat(
        _read_llama3, _llama3_calls, begin="", markers=(PYTHON_TAG,), opening="{"
    ),
    "mistral": ToolFormat(
        _read_mistral,
        _mistral_calls,
        begin=TOOL_CALLS,
        markers=(TOOL_CALLS, CALL_ID, ARGS),
        id_length=MISTRAL_ID_LENGTH,
    ),
    "pythonic": ToolFormat(
        _read_pythonic, _pythonic_calls, begin="", markers=(PYTHON_TAG,), opening="["
    ),
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One format of reasoning before the answer. Reasoning stands between two markers at the
    beginning of the answer; where the prompt ends with the first marker, the answer begins within
    reasoning."""

    begin: str
    end: str

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Reads an answer that may begin with reasoning."""
        text.keep()
        yield from text.skip()
        if not (yield from text.follows(self.begin)):
            text.rewind()
            return
        text.forget()
        yield from self.read_open(text, answer)

    def read_open(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Reads an answer that begins within reasoning."""
        answer.begin_reasoning()
        yield from text.skip("\n")
        if (yield from text.until((self.end,), answer.reasoning)):
            answer.end_reasoning()
            yield from text.skip("\n")


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}

MARKERS = tuple(
    dict.fromkeys(
        [marker for form in TOOL_FORMATS.values() for marker in form.markers]
        + [marker for form in REASONING_FORMATS.values() for marker in (form.begin, form.end)]
    )
)
"""Every text that may be a special token and has a meaning in some format."""

_TOOL_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
_REASONING_SIGNS = (("[THINK]", "mistral"), ("</think>", "think"), ("<think>", "think"))


def tool_format_of(template: str) -> str:
    """Returns the name of the tool format that a chat template uses, or "" when it shows none."""
    return next((name for sign, name in _TOOL_SIGNS if sign in template), "")


def reasoning_format_of(template: str) -> str:
    """Returns the name of the reasoning format that a chat template uses, or "" when it shows
    none."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "")


_TAIL = 64
"""In characters: more than a marker and the white space after it."""


def left_open(rendered: str, chat: ChatPrompt) -> bool:
    """Whether a rendered chat prompt ends within reasoning of any format."""
    tail = rendered[-_TAIL:].rstrip()
    final = chat.messages[-1].content if chat.continue_final_message else ""
    return any(
        tail.endswith(form.begin) or final.rfind(form.begin) > final.rfind(form.end)
        for form in REASONING_FORMATS.values()
    )
