"""Renders a conversation with a chat template, and finds which control tokens the template wrote.

The text is the one that `transformers`' `apply_chat_template(tokenize=False)` gives for the same
model. Runs in a process that may die of it.

Whose a control token in that text is, is found by rendering once more with the first character of
everything in the client's texts that could begin one *marked*: replaced by a rare symbol that
neither that text nor the client's have. What is a control token in the text with marks is the
template's. Texts with marks are as long as they were, with case and white space where they had it,
and Python and JSON write them as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Template

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request.request import ChatPrompt
from baton.core.request.validation import parse_template_kwargs
from baton.tokenizer import chat_values
from baton.tokenizer.renderers import Setup, too_much
from baton.tokenizer.sandbox import OverBudget, Sandbox

CONTINUE_MARK = "BATON_CONTINUES_HERE "
"""Stands behind the final message while it is rendered. Its space tells whether it is trimmed."""

_RANGES = ((0x2801, 0x28FF), (0x1D000, 0x1D0F5))
"""Braille and Byzantine notes: symbols, which belong to no word."""
_MARKS = [chr(mark) for first, last in _RANGES for mark in range(first, last + 1)]
_RARE = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _RANGES) + "]")

Span = tuple[int, int]
Change = Callable[[str, str], str]
"""A client's text and the role of whoever says it ("" for none), to the text that is rendered."""


class Rendered(NamedTuple):
    """own: where the text has control tokens that the template wrote; None: all are."""

    text: str
    own: list[Span] | None = None


class _Values(NamedTuple):
    """What a template is told by the client."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]

    def changed(self, change: Change) -> _Values:
        return _Values(
            [_changed(message, change, message["role"]) for message in self.messages],
            _changed(self.tools, change, ""),
            {name: _changed(value, change, "") for name, value in self.kwargs.items()},
        )

    def texts(self) -> Iterator[str]:
        """Keys are texts, too."""
        pending: list[Any] = [self.messages, self.tools, list(self.kwargs.values())]
        while pending:
            match pending.pop():
                case str(text):
                    yield text
                case list(items):
                    pending += items
                case dict(items):
                    pending += items
                    pending += items.values()


def _changed(value: Any, change: Change, role: str) -> Any:
    match value:
        case str():
            return change(value, role)
        case list():
            return [_changed(item, change, role) for item in value]
        case dict():
            return {
                _changed(key, change, role): _changed(item, change, role)
                for key, item in value.items()
            }
        case _:
            return value


class ChatTemplate:
    """The template of a setup, compiled already. sandbox: whose it is; its budget has begun."""

    def __init__(self, setup: Setup, template: Template, sandbox: Sandbox) -> None:
        self._uses_content = "content" in setup.source
        self._special_tokens = setup.special_tokens
        self._template = template
        self._sandbox = sandbox
        self._control = _Control(setup)

    def render(self, chat: ChatPrompt) -> Rendered:
        """Raises InvalidArgument naming the field at fault."""
        if not chat.messages:
            raise InvalidArgument("must hold at least one message", field="messages")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidArgument(
                "cannot be combined with add_generation_prompt", field="continue_final_message"
            )
        kwargs = parse_template_kwargs(chat.template_kwargs)
        said = _Values(chat_values.messages(chat), chat_values.tools(chat), kwargs)
        text = self._text(chat, said)
        try:
            text.encode()
        except UnicodeEncodeError:  # a template can make what no client could send
            raise InvalidArgument("must not become half a character", field="messages") from None
        control = self._control
        if not control.may_begin_in(said.texts()):
            return Rendered(text)
        marking = control.marking([text, *said.texts()])
        marked = self._marked(chat, said.changed(marking.beginnings), marking)
        if marked is None or marking.undone(marked) != text:
            # The template looks for such characters. It may, unless what it finds is control.
            if not control.is_in(said.texts()):
                return Rendered(text)
            marked = marking.found(self._text(chat, said.changed(marking.tokens)))
            text = marking.undone(marked)
        own = control.spans(marked)
        # Where both are the same, the client wrote none.
        return Rendered(text, own if control.always or own != control.spans(text) else None)

    def _marked(self, chat: ChatPrompt, said: _Values, marking: _Marking) -> str | None:
        """None where the template makes nothing of such a conversation."""
        try:
            return marking.found(self._text(chat, said))
        except InvalidArgument:
            return None

    def _text(self, chat: ChatPrompt, said: _Values) -> str:
        if not chat.continue_final_message:
            return self._render(chat, said)
        # Everything up to where the final message ends.
        final = said.messages[-1]["content"]
        with_mark = {**said.messages[-1], "content": final + CONTINUE_MARK}
        said = said._replace(messages=[*said.messages[:-1], with_mark])
        text = self._render(chat, said) if self._uses_content else ""
        mark = CONTINUE_MARK.rstrip()
        if mark not in text or final.strip() not in text:
            raise InvalidArgument(
                "the chat template does not show the final message as it is",
                field="continue_final_message",
            )
        before, _, after = text.rpartition(mark)
        # A template that trimmed the mark's space trims messages: this one's own end too.
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, chat: ChatPrompt, said: _Values) -> str:
        variables = {
            **self._special_tokens,
            **said.kwargs,
            "messages": said.messages,
            "tools": said.tools,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._sandbox.render(self._template, variables)
        except BatonError:
            raise
        except (OverBudget, MemoryError):
            raise too_much() from None
        except Exception as error:  # a template can raise anything, and its text is not ours
            raise not_accepted() from error


def not_accepted() -> InvalidArgument:
    return InvalidArgument(
        "are not accepted by the chat template; check their roles and their order",
        field="messages",
    )


class _Control:
    """The control tokens of a setup, as they are spelled."""

    def __init__(self, setup: Setup) -> None:
        self.always = setup.always
        self.any = _pattern(setup.control)
        unspoken = [text for text in setup.control if text not in setup.spoken]
        self.unspoken = _pattern(unspoken)
        self.heads = sorted({text[0] for text in setup.control})
        head = f"[{''.join(map(re.escape, self.heads))}]" if self.heads else r"(?!)"
        self.head = re.compile(head)
        self.spoken_or_head = re.compile("|".join([*map(re.escape, setup.spoken), head]))

    def may_begin_in(self, texts: Iterable[str]) -> bool:
        return self.always or any(self.head.search(text) for text in texts)

    def is_in(self, texts: Iterable[str]) -> bool:
        return self.always or any(self.any.search(text) for text in texts)

    def spans(self, text: str) -> list[Span]:
        return [found.span() for found in self.any.finditer(text)]

    def marking(self, texts: Iterable[str]) -> _Marking:
        """With marks that are in none of the texts. Raises InvalidArgument where there are none."""
        rare = (text for text in texts if not text.isascii())
        used = {found for text in rare for found in _RARE.findall(text)}
        marks = [mark for mark in _MARKS if mark not in used]
        if len(marks) < len(self.heads):
            raise not_accepted()
        return _Marking(self, dict(zip(self.heads, marks, strict=False)))


class _Marking:
    """marks: what stands for the first character of a control token, by that."""

    def __init__(self, control: _Control, marks: Mapping[str, str]) -> None:
        self._control = control
        self._marks = marks
        self._escapes = {json.dumps(mark)[1:-1]: mark for mark in marks.values()}

    def beginnings(self, text: str, role: str) -> str:
        """Change: everything that may begin a control token is marked."""
        control = self._control
        pattern = control.spoken_or_head if role == "assistant" else control.head
        return pattern.sub(lambda found: self._marks.get(found[0], found[0]), text)

    def tokens(self, text: str, role: str) -> str:
        """Change: every control token is marked."""
        pattern = self._control.unspoken if role == "assistant" else self._control.any
        return pattern.sub(lambda found: self._marks[found[0][0]] + found[0][1:], text)

    def found(self, text: str) -> str:
        """A rendered text, with the marks as they were also where JSON has escaped them."""
        for escape, mark in self._escapes.items():
            text = text.replace(escape, mark)
        return text

    def undone(self, text: str) -> str:
        for head, mark in self._marks.items():
            text = text.replace(mark, head)
        return text


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Finds what a tokenizer finds: the first, and of several that begin there the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
