"""The table of formats, and how a chat template tells which one its model writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.core.request.answer_parts import Reader
from baton.core.request.lark import Lark
from baton.core.request.reasoning import REASONING_FORMATS
from baton.core.request.request import Tool
from baton.core.request.tool_formats import hermes, llama3_json, mistral, pythonic

DEFAULT = "hermes"
"""Of a model whose template shows nothing of calls."""

CALL_ID_LENGTH = 29
MISTRAL_ID_LENGTH = 9
"""Its chat templates refuse ids of another length."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    calls: a grammar's expression for calls of these tools, the first one behind `begin`; one, or
    with True any number from one on. begin: what marks a first call anywhere in an answer; empty
    where calls are the whole answer and `opening` is its first character. markers: texts that may
    be special tokens. id_length: of a call's id.
    """

    read: Reader
    calls: Callable[[Lark, Sequence[Tool], bool], str]
    begin: str
    markers: tuple[str, ...]
    opening: str = ""
    id_length: int = CALL_ID_LENGTH


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        hermes.read, hermes.calls, begin=hermes.BEGIN, markers=(hermes.BEGIN, hermes.END)
    ),
    "llama3_json": ToolFormat(
        llama3_json.read, llama3_json.calls, begin="", markers=(llama3_json.TAG,), opening="{"
    ),
    "mistral": ToolFormat(
        mistral.read,
        mistral.calls,
        begin=mistral.BEGIN,
        markers=(mistral.BEGIN, mistral.CALL_ID, mistral.ARGS),
        id_length=MISTRAL_ID_LENGTH,
    ),
    "pythonic": ToolFormat(
        pythonic.read, pythonic.calls, begin="", markers=(pythonic.TAG,), opening="["
    ),
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


def tools_told_by(template: str) -> str:
    """The name of the format that a chat template writes calls in; "" when it shows none."""
    return next((name for sign, name in _TOOL_SIGNS if sign in template), "")


def reasoning_told_by(template: str) -> str:
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "")
