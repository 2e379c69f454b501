"""Splits the streamed text of a chat answer into content, reasoning and tool calls.

The reader of a format (`batonlm.core.request.formats.families`) is a generator that consumes an
AnswerText from left to right, yields when it needs text that has not arrived, and reports what it
finds to AnswerParts. Its result depends on the characters alone, not on how they were split into
pieces. Memory holds only the text that a reader may still have to return as content, and the
beginning of a possible marker.

Text that looks like a call and turns out to be none is returned as content. Once the name of a call
and the opening of its arguments are read, arguments are streamed; after a fault in them, only the
rest is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batonlm.core.request.request import ToolCallDelta

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_KEPT = 4096
"""Most characters that are buffered before a text is known to be a call: its name, and arguments
that precede the name."""

MAX_SPACE = 64
"""Most white-space characters next to a marker that count as part of it."""

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text does not match the format."""

    def __init__(self, taken: str = "") -> None:
        """taken: text that the reader consumed and did not pass on."""
        super().__init__()
        self.taken = taken


class AnswerText:
    """A buffer of text that arrives in pieces and is read by characters. Methods that wait for text
    are generators."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept_from: int | None = None
        self._ended = False

    def __len__(self) -> int:
        """Number of characters in memory, read or not."""
        return len(self._text)

    @property
    def at_end(self) -> bool:
        """Whether no character that has arrived is left."""
        return self._at == len(self._text)

    def add(self, piece: str) -> None:
        done = self._at if self._kept_from is None else self._kept_from
        self._text = self._text[done:] + piece
        self._at -= done
        if self._kept_from is not None:
            self._kept_from = 0

    def end(self) -> None:
        """Marks the end of the answer: no piece follows."""
        self._ended = True

    def keep(self) -> None:
        """Buffers text from here on, so that `rewind` can return to here. `forget` stops it."""
        self._kept_from = self._at

    @property
    def keeping(self) -> bool:
        return self._kept_from is not None

    def forget(self) -> None:
        self._kept_from = None

    def rewind(self) -> None:
        """Returns to where `keep` was called and stops buffering."""
        assert self._kept_from is not None
        self._at, self._kept_from = self._kept_from, None

    def peek(self) -> Reading[str]:
        """Returns the next character without consuming it, or "" at the end. Raises Malformed when
        more than MAX_KEPT characters are buffered."""
        if self._kept_from is not None and self._at - self._kept_from >= MAX_KEPT:
            raise Malformed
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def step(self) -> str:
        """Consumes and returns the character that `peek` returned."""
        self._at += 1
        return self._text[self._at - 1]

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> str:
        """Consumes the part of a run that has arrived; returns "" when the next character does not
        match. The pattern is one repeated class of characters. most: the largest number of
        characters."""
        end = len(self._text) if most is None else self._at + most
        if self._kept_from is not None:
            end = min(end, self._kept_from + MAX_KEPT)
        found = pattern.match(self._text, self._at, end)
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def word(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Consumes a whole run of at most `most` characters, and waits for its end."""
        word = ""
        while len(word) < most and (yield from self.peek()):
            piece = self.run(pattern, most - len(word))
            if not piece:
                break
            word += piece
        return word

    def follows(self, literal: str) -> Reading[bool]:
        """Consumes the literal if it comes next; returns whether it did."""
        while not self._text.startswith(literal, self._at):
            if self._ended or not literal.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(literal)
        return True

    def next_is(self, literal: str) -> Reading[bool]:
        """Returns whether the literal comes next, without consuming it."""
        if (yield from self.follows(literal)):
            self._at -= len(literal)
            return True
        return False

    def expect(self, literal: str) -> Reading[None]:
        """Consumes the literal. Raises Malformed when something else comes next."""
        if not (yield from self.follows(literal)):
            raise Malformed

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Consumes at most MAX_SPACE of the given characters."""
        for _ in range(MAX_SPACE):
            char = yield from self.peek()
            if not char or char not in characters:
                return
            self._at += 1

    def until(self, markers: Sequence[str], emit: Emit) -> Reading[str]:
        """Emits the text before the first marker and consumes the marker. Returns the marker, or ""
        at the end."""
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

    def upto(self, marker: str, most: int) -> Reading[str]:
        """Consumes and returns the text before a marker, and consumes the marker. Raises Malformed
        when none is within `most` characters."""
        while True:
            found = self._text.find(marker, self._at, self._at + most + len(marker))
            if found >= 0:
                text = self._text[self._at : found]
                self._at = found + len(marker)
                return text
            if self._ended or len(self._text) - self._at >= most + len(marker):
                raise Malformed
            yield

    def unread(self, marker: str) -> None:
        """Returns to before a marker that was consumed last."""
        self._at -= len(marker)

    def _begun(self, markers: Sequence[str]) -> int:
        """Returns how many characters at the end may be the beginning of a marker."""
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
    """What one piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Trimmed:
    """Text whose trailing white space is held back, because it may belong to a marker that
    follows."""

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self.held = ""
        """The white space that is held back."""
        self._ready: list[str] = []
        self.spoken = False
        """Whether any character other than white space was added since `drop`."""

    def add(self, text: str) -> None:
        text = self.held + text
        kept = text.rstrip(self._characters)
        self.spoken = self.spoken or bool(kept)
        cut = max(len(kept), len(text) - MAX_SPACE)
        self.held = text[cut:]
        if cut:
            self._ready.append(text[:cut])

    def drop(self) -> None:
        """Drops the white space that is held back: a marker follows."""
        self.held, self.spoken = "", False

    def flush(self) -> None:
        """Releases the white space that is held back: no marker follows."""
        self._ready.append(self.held)
        self.held = ""

    def take(self) -> str:
        """Returns the text that is ready and was not returned before."""
        text = "".join(self._ready)
        self._ready.clear()
        return text


Schema = Mapping[str, Any]
"""A JSON schema."""

Reader = Callable[[AnswerText, "AnswerParts"], Reading[None]]
"""Reads the text of an answer and reports what it finds to the AnswerParts."""


class AnswerParts:
    """Collects the content, the reasoning and the tool calls of one answer."""

    def __init__(
        self,
        readers: tuple[Reader, ...],
        tools: Mapping[str, Schema],
        call_id: Callable[[int], str],
    ) -> None:
        """readers run one after another, each from where the previous one stopped; the rest of the
        text is content. tools: the parameters of the tools that may be called, by name. call_id:
        returns the id of the call at an index."""
        self._tools = tools
        self._call_id = call_id
        self._ids = set[str]()
        self._text = AnswerText()
        self._content = Trimmed(SPACE if tools else "")
        self._reasoning = Trimmed("\n")
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0
        self.in_call = False
        """Whether the newest call is incomplete: it still arrives, was cut, or has a fault."""
        self._parted = False
        self.reasoned = False
        self.reasoning_ended = False
        self._reading: Reading[None] | None = self._read(readers)
        next(self._reading)

    @property
    def num_kept(self) -> int:
        """Characters in memory: those that are read from now on, and those that are held back."""
        return len(self._text) + len(self._content.held)

    def feed(self, text: str, *, last: bool = False) -> Parts:
        """Returns what this text adds. last: no text follows it."""
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
        """Begins a part of the reasoning; later parts are on lines of their own."""
        if self.reasoned:
            self._reasoning.add("\n")
        self.reasoned = True

    def begin_content(self) -> None:
        """Begins a part of the content; later parts are on lines of their own."""
        if self._parted:
            self._content.add("\n")
        self._parted = True

    def end_reasoning(self) -> None:
        self.reasoning_ended = True
        self._reasoning.drop()

    def open_call(self, name: str, written_id: str = "") -> Schema:
        """Begins a call and returns the tool's parameters. The text of its beginning is no longer
        returned as content. written_id: the id that the model wrote, which is used unless another
        call of this answer has it. Raises Malformed when no tool has this name."""
        if name not in self._tools:
            raise Malformed
        self._text.forget()
        self._content.drop()
        call_id = written_id
        if not call_id or call_id in self._ids:
            call_id = self._call_id(self.num_calls)
        self._ids.add(call_id)
        self._calls.append(ToolCallDelta(self.num_calls, call_id, name))
        self.num_calls += 1
        self.in_call = True
        return self._tools[name]

    def arguments(self, text: str) -> None:
        """Appends to the arguments of the newest call."""
        newest, index = self._calls[-1] if self._calls else None, self.num_calls - 1
        if newest is not None and newest.index == index:
            text = newest.arguments + text
            self._calls[-1] = ToolCallDelta(index, newest.id, newest.name, text)
        else:
            self._calls.append(ToolCallDelta(index, arguments=text))

    def close_call(self) -> None:
        self.in_call = False


def attempt(
    text: AnswerText, answer: AnswerParts, marker: str, *calls: Callable[[], Reading[None]]
) -> Reading[int | None]:
    """Reads a call after its marker in the first of several ways that fits; returns which one, or
    None. When none does, and nothing was reported, the marker is content and reading continues
    right after it."""
    for number, call in enumerate(calls):
        text.keep()
        try:
            yield from call()
        except Malformed as fault:
            if not text.keeping:
                answer.content(fault.taken)
                return None
            text.rewind()
        else:
            text.forget()
            return number
    answer.content(marker)
    return None
