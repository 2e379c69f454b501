"""What the APIs share in translating: structured output to a Grammar, and failures back into the
names of fields that their clients use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request.request import Grammar, GrammarKind

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
MAX_CHOICES = 1024

_PREDICATES = ("must ", "cannot be ", "takes ")
"""How a message begins that describes its field without naming it."""


def lark_or_gbnf(text: str) -> Grammar:
    """Only rules of GBNF have "::="."""
    return Grammar(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text)


def choice(texts: Sequence[str], field: str) -> Grammar:
    """One of several texts. Raises InvalidArgument naming the field."""
    if not texts:
        raise InvalidArgument(f"{field} must have at least one text", field=field)
    if len(texts) > MAX_CHOICES:
        raise InvalidArgument(f"{field} must have at most {MAX_CHOICES} texts", field=field)
    if not all(texts):
        raise InvalidArgument(f"{field} must not have an empty text", field=field)
    return Grammar(GrammarKind.REGEX, "|".join("".join(map(_literal, text)) for text in texts))


def _literal(character: str) -> str:
    """A regular expression that matches just this character."""
    plain = character.isascii() and character.isalnum()
    return character if plain else rf"\x{{{ord(character):X}}}"


def in_client_words(error: BatonError, names: Mapping[str, str]) -> BatonError:
    """The same failure with the client's name of the field, in its message, too.

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
