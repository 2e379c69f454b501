"""Reads the events of a streamed completion and counts its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

_DATA = b"data:"
_END = b"\n\n"
LONGEST = 64 * 2**20
"""Of an event: more is no event, and would grow for ever."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Events:
    """One answer. hear: told of the ids of new tokens and how many they are; where a server sends
    no ids, each event with text counts as one token.
    """

    def __init__(self, hear: Callable[[Sequence[int], int], None]) -> None:
        self.done = False
        """It ended as it should."""
        self.failed = False
        """It said that it failed, or something that cannot be read."""
        self._hear = hear
        self._unread = b""

    def feed(self, part: bytes) -> None:
        """More of the body, cut anywhere."""
        unread = self._unread + part if self._unread else part
        *events, self._unread = unread.replace(b"\r\n", b"\n").split(_END)
        if len(self._unread) > LONGEST:
            self.failed, self._unread = True, b""
        for event in events:
            if event.startswith(_DATA):
                self._data(event[len(_DATA) :].strip())

    def _data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError:
            self.failed = True
            return
        if chunk.error is not None:
            self.failed = True
        for choice in chunk.choices:
            if choice.token_ids:
                self._hear(choice.token_ids, len(choice.token_ids))
            elif choice.token_ids is None and choice.text:
                self._hear((), 1)
