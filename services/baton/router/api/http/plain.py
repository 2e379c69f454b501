"""Chunks that say nothing but text, put together from bytes: nearly all of a stream are such.

Knows neither API's words: it has the API word one such chunk with a mark for its text, and keeps
what stands before and behind the mark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from operator import attrgetter

from baton.core.request.request import Delta
from baton.router.api.http.respond import Json, encode, encode_text

_MARK = "\ue000text\ue001"

_told = attrgetter(
    *(f.name for f in fields(Delta) if f.name not in ("choice", "text", "token_ids"))
)
_NOTHING = _told(Delta(0))
"""Whatever a delta may say besides its text, unsaid."""


class PlainChunks:
    """Of one prompt's choices. words: the chunks of a delta as they are sent; of one that is only
    text there is one, and always the same but for the text.
    """

    def __init__(self, words: Callable[[Delta], list[Json]]) -> None:
        self._words = words
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, delta: Delta) -> bytes | None:
        """The whole event, or None when the delta says more than text, or no text."""
        if not delta.text or _told(delta) != _NOTHING:
            return None
        around = self._around.get(delta.choice)
        if around is None:
            around = self._around[delta.choice] = self._ask(delta)
        return around[0] + encode_text(delta.text) + around[1]

    def _ask(self, delta: Delta) -> tuple[bytes, bytes]:
        (chunk,) = self._words(replace(delta, text=_MARK))
        head, _, tail = encode(chunk).partition(encode_text(_MARK))
        return b"data: " + head, tail + b"\n\n"
