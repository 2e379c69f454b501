"""Splits the text of a chat answer into content, reasoning and calls of tools, as it comes.

Knows no format: readers (`baton.core.request.reasoning`, `baton.core.request.tool_formats`) tell it
what they find. Of a call that turns out to be none everything comes out as content; once its name
and the opening of its arguments are read, they go out as they come, and only what follows a fault
is content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.request.answer_text import MAX_SPACE, SPACE, AnswerText, Malformed, Reading
from baton.core.request.request import ToolCallDelta


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


class Reader(Protocol):
    """Reads an answer and tells what it finds."""

    def __call__(self, text: AnswerText, answer: AnswerParts) -> Reading[None]: ...


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
