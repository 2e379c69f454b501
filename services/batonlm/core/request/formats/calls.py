"""The engine of tool-call formats: a format is a table of texts (`Layout`) around the calls, whose
names and arguments a `CallBody` reads and writes.

    head open (call body close) between (call body close) … tail
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batonlm.core.request.formats.bodies import CallBody
from batonlm.core.request.formats.lark import ANYTHING, Lark, several
from batonlm.core.request.formats.reader import AnswerParts, AnswerText, Reading, attempt
from batonlm.core.request.request import Tool

CALL_ID_LENGTH = 29


class ToolFormat(Protocol):
    """One format of tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""

    @property
    def id_length(self) -> int:
        """Characters of a call id."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Markers that end the model's turn."""

    @property
    def ends_reasoning(self) -> tuple[str, ...]:
        """Markers that begin calls also within reasoning, which they end."""

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Reads an answer, or the part after its reasoning."""

    def required(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        """Returns the grammar of one call, or of one or more. Raises InvalidArgument (`tools`)."""

    def at_most_one(self, lark: Lark, tools: Sequence[Tool], reasoning_begin: str) -> str:
        """Returns the grammar of text without a call, or of one call, preceded by such text where
        the format allows it. reasoning_begin: the text that begins reasoning, or "". Raises
        InvalidArgument (`tools`)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts around calls. White space in them is what the model's chat template writes, and
    what the grammar asks for; a reader accepts any other amount of it."""

    body: CallBody
    head: str = ""
    """Marks a list of calls anywhere in an answer. Without this and `call`, calls are the whole
    answer."""
    open: str = ""
    """Follows `head`."""
    call: str = ""
    """Begins each call."""
    close: str = ""
    """Ends each call."""
    between: str = ""
    """Separates two calls."""
    tail: str = ""
    """Ends the list."""
    needs: tuple[str, ...] = ()
    """Markers that a model writes this layout with only where they are tokens."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that mark a call anywhere in an answer. A list's head may be missing."""
        return tuple(each for each in (self.head, self.call.strip()) if each)

    @property
    def before(self) -> str:
        """All texts before the first call."""
        return f"{self.head}{self.open}{self.call}"

    def first(self, text: AnswerText, answer: AnswerParts, marker: str) -> Reading[None]:
        """Reads the first call of a list after its marker."""
        if not self.call or marker != self.call.strip():
            for expected in (self.open.strip(), self.call.strip()):
                yield from text.skip()
                yield from text.expect(expected)
        yield from text.skip()
        yield from self.body.read(text, answer)

    def rest(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Reads the list from behind its first call up to its end, or up to what is no call."""
        another: int | None = 0
        while another is not None:
            if self.close:
                text.keep()
                yield from text.skip()
                if (yield from text.follows(self.close.strip())):
                    text.forget()
                else:
                    text.rewind()
            if self.call and not self.head:
                return
            text.keep()
            yield from text.skip()
            if self.tail and (yield from text.follows(self.tail.strip())):
                text.forget()
                return
            separator = self.between.strip() or self.call.strip()
            if separator and (yield from text.follows(separator)):
                text.forget()
                following = partial(self._following, text, answer)
                another = yield from attempt(text, answer, separator, following)
                continue
            opening = self.body.opening
            there = (yield from text.peek()) if opening and not self.call else ""
            text.rewind()
            if not there or there != opening:
                return
            another = yield from attempt(text, answer, "", partial(self._following, text, answer))

    def _following(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        yield from text.skip()
        if self.call and self.between.strip():
            yield from text.expect(self.call.strip())
            yield from text.skip()
        yield from self.body.read(text, answer)

    def written(
        self, lark: Lark, tools: Sequence[Tool], parallel: bool, before: str | None = None
    ) -> str:
        """Returns the grammar of calls. before: what was written already, at the beginning."""
        head = self.before if before is None else self.before.removeprefix(before)

        def one(before: str) -> str:
            # A text and what follows it are one literal: of literals, the longest that fits counts.
            call = lark.one_of([self.body.write(lark, tool, before) for tool in tools])
            return f"{call} {lark.text(self.close)}" if self.close else call

        calls = several(one(head), one(f"{self.between}{self.call}"), parallel)
        return f"{calls} {lark.text(self.tail)}" if self.tail else calls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A tool format of one or more layouts. All are read; the first one is written whose needed
    markers are tokens, else the last one."""

    layouts: tuple[Layout, ...]
    markers: tuple[str, ...] = ()
    also_begin: tuple[str, ...] = ()
    """Other texts that mark calls anywhere in an answer, and are never written."""
    ignored: tuple[str, ...] = ()
    """Markers that are left out of the content."""
    id_length: int = CALL_ID_LENGTH
    stops: tuple[str, ...] = ()
    ends_reasoning: tuple[str, ...] = ()

    @property
    def _whole(self) -> bool:
        """Whether calls are the whole answer."""
        return not any(layout.begins for layout in self.layouts)

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        if self._whole:
            yield from self._calls(text, answer, "")
        markers = [marker for layout in self.layouts for marker in layout.begins]
        markers = [*dict.fromkeys([*markers, *self.also_begin]), *self.ignored]
        while marker := (yield from text.until(markers, answer.content)):
            if marker not in self.ignored:
                yield from self._calls(text, answer, marker)

    def _calls(self, text: AnswerText, answer: AnswerParts, marker: str) -> Reading[None]:
        layouts = [each for each in self.layouts if marker in (*each.begins, "", *self.also_begin)]
        ways = [partial(layout.first, text, answer, marker) for layout in layouts]
        way = yield from attempt(text, answer, marker, *ways)
        if way is not None:
            yield from layouts[way].rest(text, answer)

    def _written(self, lark: Lark) -> Layout:
        for layout in self.layouts[:-1]:
            if all(map(lark.is_token, layout.needs)):
                return layout
        return self.layouts[-1]

    def required(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        return self._written(lark).written(lark, tools, parallel)

    def at_most_one(self, lark: Lark, tools: Sequence[Tool], reasoning_begin: str) -> str:
        layout = self._written(lark)
        marks = tuple(self._marks())
        if not self._whole:
            begin = layout.begins[0]
            after = lark.without(marks, end=begin)
            call = layout.written(lark, tools, False, begin)
            return f"{lark.without(marks)} | {after} {call}"
        # Text that begins like reasoning would be read as reasoning, and a call after it as a call.
        excluded = [f"{ANYTHING} {lark.literal(marker)} {ANYTHING}" for marker in marks]
        if reasoning_begin:
            excluded.append(f"{lark.literal(reasoning_begin)} {ANYTHING}")
        opening = layout.open.strip() or layout.body.opening
        plain = " & ".join([f"/[^\\s\\{opening}](?s:.*)/", *(f"~({each})" for each in excluded)])
        return f'"" | {lark.terminal(plain)} | {layout.written(lark, tools, False)}'

    def _marks(self) -> Iterator[str]:
        for layout in self.layouts:
            yield from layout.begins
        yield from self.also_begin
