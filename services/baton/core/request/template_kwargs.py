"""Reads the further variables that a client gives its chat template; knows no template.

They are data for somebody else's program, so they are small, plain JSON, and never stand for what
the conversation itself says.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from baton.core.errors import InvalidArgument
from baton.core.request.checks import is_whole

FIELD = "template_kwargs"
MAX_BYTES = 1 << 14
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
"""Names that a request has fields of its own for, or that would change what is returned."""


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """The variables by name; none for an empty text. Raises InvalidArgument naming FIELD."""
    if not text:
        return {}
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise _wrong(f"must have at most {MAX_BYTES} bytes")
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
        whole = is_whole(values)
    except (ValueError, RecursionError):
        raise _wrong("must be JSON, and not nested deeply") from None
    if not whole:
        raise _wrong("must have no escape of half a character")
    if not isinstance(values, dict):
        raise _wrong("must be a JSON object")
    for name in values:
        if not name.isidentifier() or name.startswith("_"):
            raise _wrong("must have keys that are names, without an underscore in front")
        if name in RESERVED:
            raise _wrong(f"must not set {name}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _wrong(what: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD} {what}", field=FIELD)
