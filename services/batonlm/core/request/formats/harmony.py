"""Harmony, the format of GPT-OSS: an answer is a list of messages on channels.

    <|channel|>analysis<|message|>…<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                    content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                      content

The prompt ends with the first `<|start|>assistant`. The recipient may stand before or after the
channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from batonlm.core.request.formats.calls import CALL_ID_LENGTH
from batonlm.core.request.formats.lark import Lark
from batonlm.core.request.formats.reader import (
    AnswerParts,
    AnswerText,
    Malformed,
    Reading,
    attempt,
)
from batonlm.core.request.formats.values import json_value
from batonlm.core.request.request import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN)

MAX_HEADER = 512
"""Most characters of a message's header."""

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)", re.ASCII)
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")


@dataclass(frozen=True, slots=True)
class Harmony:
    """Reads and writes answers in harmony, with their reasoning and their calls."""

    markers: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    id_length: int = CALL_ID_LENGTH
    stops: tuple[str, ...] = (CALL, RETURN)
    ends_reasoning: tuple[str, ...] = ()

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        headed = yield from self._begins_with_header(text)
        marker = (yield from self._message(text, answer, "")) if headed else ""
        while True:
            if marker != START:
                marker = yield from text.until((START, CHANNEL, *_ENDS), answer.content)
                if not marker:
                    return
            if marker not in _ENDS:
                marker = yield from self._message(text, answer, marker)

    def _begins_with_header(self, text: AnswerText) -> Reading[bool]:
        text.keep()
        yield from text.skip()
        found = (yield from text.next_is(CHANNEL)) or (yield from text.next_is("to="))
        text.rewind()
        return found

    def _message(self, text: AnswerText, answer: AnswerParts, opening: str) -> Reading[str]:
        """Reads a message after the marker that opens it; returns the marker that ends it."""
        text.keep()
        try:
            header = yield from text.upto(MESSAGE, MAX_HEADER)
        except Malformed:
            text.rewind()
            if len(text) < MAX_HEADER:  # the answer was cut within a header
                yield from text.until((), lambda _: None)
            else:
                answer.content(opening)
            return ""
        text.forget()
        whole = f"{opening}{header}{MESSAGE}"
        found = _RECIPIENT.search(whole)
        if found is not None:
            way = yield from attempt(text, answer, whole, partial(_call, text, answer, found[1]))
            if way is None:
                return (yield from text.until((START, *_ENDS), answer.content))
            return (yield from text.until((START, *_ENDS), lambda _: None))
        if _ANALYSIS.search(whole):
            answer.begin_reasoning()
            marker = yield from text.until((START, *_ENDS), answer.reasoning)
            if marker:
                answer.end_reasoning()
            return marker
        answer.begin_content()
        return (yield from text.until((START, *_ENDS), answer.content))

    def required(self, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        # A call ends the model's turn.
        calls = []
        for tool in tools:
            head = f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"
            calls.append(f"{lark.text(head)} {lark.arguments(tool)}")
        return lark.one_of(calls)

    def at_most_one(self, lark: Lark, tools: Sequence[Tool], reasoning_begin: str) -> str:
        text = lark.without(self.markers)
        final = f"{lark.text(f'{CHANNEL}final{MESSAGE}')} {text}"
        return f"{final} | {self.required(lark, tools, False)}"


def _call(text: AnswerText, answer: AnswerParts, name: str) -> Reading[None]:
    yield from text.skip()
    if (yield from text.peek()) != "{":
        raise Malformed
    answer.open_call(name)
    yield from json_value(text, answer.arguments)
    answer.close_call()
