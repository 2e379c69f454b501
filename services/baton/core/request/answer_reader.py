"""Splits the text of a chat answer into content, reasoning and calls of tools, as it comes.

A reader of a format (`baton.core.request.tool_formats`) is a generator that takes an AnswerText
from left to right, yields when it needs text that is not here yet, and reports what it finds to
AnswerParts. What it takes depends on the characters alone, never on how they were cut into pieces,
so what it makes of an answer does not either. Only the text that a reader keeps, to give it back as
content, and the beginning of what may be a marker stay in memory.

Of a call that turns out to be none everything comes out as content. Once the name of a call and the
opening of its arguments are read, they go out as they come, and only what follows a fault is
content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.core.request.request import ToolCallDelta

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Trimmed:
    """Text of which white space at the end is held back, for it may belong to a marker."""

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._held = ""
        self._ready: list[str] = []
        self.spoken = False
        """Whether it has anything but white space since `drop`."""

    def add(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip(self._characters)
        self.spoken = self.spoken or bool(kept)
        cut = max(len(kept), len(text) - MAX_SPACE)
        self._held = text[cut:]
        if cut:
            self._ready.append(text[:cut])

    def drop(self) -> None:
        """A marker follows."""
        self._held, self.spoken = "", False

    def flush(self) -> None:
        """No marker follows."""
        self._ready.append(self._held)
        self._held = ""

    def take(self) -> str:
        """What is not held back and was not taken."""
        text = "".join(self._ready)
        self._ready.clear()
        return text


Reader = Callable[[AnswerText, "AnswerParts"], Reading[None]]
"""Reads the text of an answer and reports what it finds to the AnswerParts."""


class AnswerParts:
    """One answer. names: of the tools that may be called. call_id: a call's id by its index.
    readers: each goes on where the one before it left off; what none takes is content.
    """

    def __init__(
        self, readers: tuple[Reader, ...], names: frozenset[str], call_id: Callable[[int], str]
    ) -> None:
        self._names = names
        self._call_id = call_id
        self._text = AnswerText()
        self._content = Trimmed(SPACE if names else "")
        self._reasoning = Trimmed("\n")
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0
        self.in_call = False
        """The newest call is not complete: it goes on, was cut or has a fault."""
        self.reasoned = False
        self.reasoning_ended = False
        self._reading: Reading[None] | None = self._read(readers)
        next(self._reading)

    def feed(self, text: str, *, last: bool = False) -> Parts:
        """What follows from more text. last: none comes after it."""
        self._text.add(text)
        if last:
            self._text.end()
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        if last:
            self._reasoning.flush()
            if self._content.spoken or not self.num_calls:
                self._content.flush()
        calls, self._calls = tuple(self._calls), []
        return Parts(self._content.take(), self._reasoning.take(), calls)

    def _read(self, readers: tuple[Reader, ...]) -> Reading[None]:
        yield
        for reader in readers:
            yield from reader(self._text, self)
        yield from self._text.until((), self.content)

    def content(self, text: str) -> None:
        self._content.add(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.add(text)

    def begin_reasoning(self) -> None:
        self.reasoned = True

    def end_reasoning(self) -> None:
        self.reasoning_ended = True
        self._reasoning.drop()

    def open_call(self, name: str) -> None:
        """Begins a call; nothing before it comes back as content. Raises Malformed for a name that
        no tool has."""
        if name not in self._names:
            raise Malformed
        self._text.forget()
        self._content.drop()
        self._calls.append(ToolCallDelta(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        """More of the call that was begun last."""
        newest, index = self._calls[-1] if self._calls else None, self.num_calls - 1
        if newest is not None and newest.index == index:
            text = newest.arguments + text
            self._calls[-1] = ToolCallDelta(index, newest.id, newest.name, text)
        else:
            self._calls.append(ToolCallDelta(index, arguments=text))

    def close_call(self) -> None:
        self.in_call = False


def attempt(
    text: AnswerText, answer: AnswerParts, marker: str, call: Reading[None]
) -> Reading[bool]:
    """Reads a call after its marker; returns whether it was one. If nothing of it was told, its
    marker is content and reading goes on right behind it."""
    text.keep()
    try:
        yield from call
    except Malformed as fault:
        if text.keeping:
            answer.content(marker)
            text.rewind()
        else:
            answer.content(fault.taken)
        return False
    return True


def attempt_list(
    text: AnswerText,
    answer: AnswerParts,
    marker: str,
    first: Reading[None],
    following: Callable[[], Reading[None]],
) -> Reading[None]:
    """Reads the calls of a list, of which `first` takes the bracket and the first call, to its end
    or to what is no call. marker: what was read before the list."""
    more = yield from attempt(text, answer, marker, first)
    while more:
        yield from text.skip()
        if (yield from text.follows("]")) or not (yield from text.follows(",")):
            return
        more = yield from attempt(text, answer, ",", following())
