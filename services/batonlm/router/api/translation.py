"""Translation that the APIs share: structured output to a Grammar, parts of a conversation to its
messages, and errors back to the client's field names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.request import Grammar, GrammarKind, Message, ToolCall
from batonlm.core.request.validation import wrong

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
MAX_CHOICES = 1024
IDEMPOTENCY_KEY = "Idempotency-Key"
"""A header over HTTP, metadata over gRPC."""
_KEY = re.compile(r"[ -~]{1,255}", re.ASCII)

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""By the effort that clients of Anthropic and Ollama name, the value of `reasoning_effort` that
chat templates know."""

Value = TypeVar("Value")

_PREDICATES = ("must ", "cannot be ", "takes ", "is not supported ")
"""Beginnings of messages that describe their field without naming it."""


@dataclass(slots=True)
class Turn:
    """One of core's messages while it grows from parts of the client's."""

    role: str
    origin: str
    """The client's field that it comes from."""
    tool_call_id: str = ""
    tool: str = ""
    """The name of the tool that was called."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            self.role,
            "\n".join(filter(None, self.texts)),
            tool_calls=tuple(self.calls),
            tool_call_id=self.tool_call_id,
            name=self.tool,
            reasoning="".join(self.thoughts),
        )


def required(field: str, value: Value | None) -> Value:
    """Returns the value. Raises InvalidArgument naming the client's field where there is none."""
    if value is None:
        raise wrong(field, "is required")
    return value


def lark_or_gbnf(text: str) -> Grammar:
    """Parses text as GBNF when it contains "::=", which only GBNF rules have, otherwise as Lark."""
    return Grammar(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text)


def choice(texts: Sequence[str], field: str) -> Grammar:
    """Returns a grammar of one of several texts. Raises InvalidArgument naming the field."""
    if not texts:
        raise InvalidArgument(f"{field} must have at least one text", field=field)
    if len(texts) > MAX_CHOICES:
        raise InvalidArgument(f"{field} must have at most {MAX_CHOICES} texts", field=field)
    if not all(texts):
        raise InvalidArgument(f"{field} must not have an empty text", field=field)
    return Grammar(GrammarKind.REGEX, "|".join("".join(map(_literal, text)) for text in texts))


def checked_key(text: str) -> str:
    """Returns the idempotency key that a client sent, with or without the quotes of a structured
    field. Raises InvalidArgument."""
    key = text.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise InvalidArgument(
            f"{IDEMPOTENCY_KEY} must have 1 to 255 printable ASCII characters",
            field=IDEMPOTENCY_KEY,
        )
    return key


def _literal(character: str) -> str:
    """Returns a regular expression that matches this character."""
    plain = character.isascii() and character.isalnum()
    return character if plain else rf"\x{{{ord(character):X}}}"


def in_client_words(error: BatonError, names: Mapping[str, str]) -> BatonError:
    """Returns the error with the client's name of the field, also in its message.

    names: core's field names to the client's, where they differ.
    """
    name, message = names.get(error.field, error.field), error.message
    if error.field and message.startswith(error.field):
        message = name + message.removeprefix(error.field)
    elif name and message.startswith(_PREDICATES):  # from a process that does not name the field
        message = f"{name} {message}"
    worded = type(error)(message, field=name, retry_after_s=error.retry_after_s)
    worded.request_id = error.request_id
    return worded
