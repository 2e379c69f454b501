"""What the APIs share in translating: structured output to a Grammar, and failures back into the
names of fields that their clients use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request.request import Grammar, GrammarKind

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
MAX_TEXTS = 1024


class Asked(NamedTuple):
    """field: in the client's words."""

    grammar: Grammar
    field: str


def any_object(field: str) -> Asked:
    return Asked(ANY_OBJECT, field)


def json_schema(text: str, field: str) -> Asked:
    """text: the schema as JSON, its keys in the order in which an answer is to have them."""
    return Asked(Grammar(GrammarKind.JSON_SCHEMA, text), field)


def regex(text: str, field: str) -> Asked:
    return Asked(Grammar(GrammarKind.REGEX, text), field)


def lark(text: str, field: str) -> Asked:
    return Asked(Grammar(GrammarKind.LARK, text), field)


def gbnf(text: str, field: str) -> Asked:
    return Asked(Grammar(GrammarKind.GBNF, text), field)


def either_grammar(text: str, field: str) -> Asked:
    """Lark or GBNF, told apart by how rules are written: only GBNF's have "::="."""
    return gbnf(text, field) if "::=" in text else lark(text, field)


def choice(texts: Sequence[str], field: str) -> Asked:
    """One of several texts. Raises InvalidArgument naming the field."""
    if not texts:
        raise InvalidArgument(f"{field} must have at least one text", field=field)
    if len(texts) > MAX_TEXTS:
        raise InvalidArgument(f"{field} must have at most {MAX_TEXTS} texts", field=field)
    if not all(texts):
        raise InvalidArgument(f"{field} must not have an empty text", field=field)
    return regex("|".join("".join(map(_literal, text)) for text in texts), field)


def _literal(character: str) -> str:
    """A regular expression for one character, whatever it means in one."""
    plain = character.isascii() and character.isalnum()
    return character if plain else rf"\x{{{ord(character):X}}}"


_PREDICATES = ("must ", "cannot be ", "takes ")
"""What a message begins with that says something of its field, without naming it."""


def in_client_words(error: BatonError, names: Mapping[str, str]) -> BatonError:
    """names: core's field names to the client's, where they differ."""
    name, message = names.get(error.field, error.field), error.message
    if error.field and message.startswith(error.field):
        message = name + message.removeprefix(error.field)
    elif name and message.startswith(_PREDICATES):  # from a process that tells the field apart
        message = f"{name} {message}"
    worded = type(error)(message, field=name, retry_after_s=error.retry_after_s)
    worded.request_id = error.request_id
    return worded
