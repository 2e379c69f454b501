"""Failures in the words of whoever asked: core's field names become theirs."""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.errors import BatonError

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
