"""An answer's text as it comes, for readers that take it from left to right.

A reader is a generator: it yields when it needs text that is not here yet. What it takes depends on
the characters alone, never on how they were cut into pieces, so what it makes of an answer does not
either. Only what a reader keeps, to give it back as plain text, and the beginning of what may be a
marker stay in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_KEPT = 4096
"""Characters of a call before it is known to be one: its name, and arguments that precede it."""

MAX_SPACE = 64
"""White space next to a marker belongs to it, so much of it."""

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is not what the reader was there for. taken: what it took and passed on nowhere."""

    def __init__(self, taken: str = "") -> None:
        super().__init__()
        self.taken = taken


class AnswerText:
    """Pieces in, characters out. The methods that wait return generators."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept_from: int | None = None
        self._ended = False

    def add(self, piece: str) -> None:
        done = self._at if self._kept_from is None else self._kept_from
        self._text = self._text[done:] + piece
        self._at -= done
        if self._kept_from is not None:
            self._kept_from = 0

    def end(self) -> None:
        """No piece follows."""
        self._ended = True

    def keep(self) -> None:
        """From here on, until `forget`, `rewind` is possible."""
        self._kept_from = self._at

    @property
    def keeping(self) -> bool:
        return self._kept_from is not None

    def forget(self) -> None:
        self._kept_from = None

    def rewind(self) -> None:
        """Back to where `keep` was called; nothing is kept any more."""
        assert self._kept_from is not None
        self._at, self._kept_from = self._kept_from, None

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end. Raises Malformed when too much is kept."""
        if self._kept_from is not None and self._at - self._kept_from >= MAX_KEPT:
            raise Malformed
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def step(self) -> str:
        """Takes the character that was peeked at."""
        self._at += 1
        return self._text[self._at - 1]

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> str:
        """Takes what is here of a run; empty when the next character does not belong to it. The
        pattern is one class of characters, repeated."""
        end = len(self._text) if most is None else self._at + most
        if self._kept_from is not None:
            end = min(end, self._kept_from + MAX_KEPT)
        found = pattern.match(self._text, self._at, end)
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def word(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """A whole run, or so much of it."""
        word = ""
        while len(word) < most and (yield from self.peek()):
            piece = self.run(pattern, most - len(word))
            if not piece:
                break
            word += piece
        return word

    def follows(self, literal: str) -> Reading[bool]:
        """Takes the literal if it is what comes next."""
        while not self._text.startswith(literal, self._at):
            if self._ended or not literal.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(literal)
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Raises Malformed when something else comes."""
        if not (yield from self.follows(literal)):
            raise Malformed

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Leaves out white space."""
        for _ in range(MAX_SPACE):
            char = yield from self.peek()
            if not char or char not in characters:
                return
            self._at += 1

    def until(self, markers: Sequence[str], emit: Emit) -> Reading[str]:
        """Passes on the text before the first marker, which it takes and returns; "" at the end."""
        while True:
            found = [(self._text.find(marker, self._at), marker) for marker in markers]
            start, marker = min(((at, m) for at, m in found if at >= 0), default=(-1, ""))
            end = start if marker else len(self._text) - self._begun(markers)
            if end > self._at:
                emit(self._text[self._at : end])
            self._at = end + len(marker)
            if marker or self._ended:
                return marker
            yield

    def _begun(self, markers: Sequence[str]) -> int:
        """How many characters at the end may begin a marker."""
        if self._ended:
            return 0
        here = len(self._text) - self._at
        longest = max(map(len, markers), default=1) - 1
        for count in range(min(longest, here), 0, -1):
            tail = self._text[-count:]
            if any(marker.startswith(tail) for marker in markers):
                return count
        return 0
