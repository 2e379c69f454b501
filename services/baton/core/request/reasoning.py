"""What a model thinks aloud before it answers: between two markers, at the beginning of its answer
or, where the prompt holds the first marker, from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.request.answer_parts import AnswerParts
from baton.core.request.answer_text import AnswerText, Reading
from baton.core.request.request import ChatPrompt

_TAIL = 64
"""Characters: more than a marker and the white space behind it."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str

    def read(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Of an answer that begins with reasoning, if it does."""
        text.keep()
        yield from text.skip()
        if not (yield from text.follows(self.begin)):
            text.rewind()
            return
        text.forget()
        yield from self.read_open(text, answer)

    def read_open(self, text: AnswerText, answer: AnswerParts) -> Reading[None]:
        """Of an answer that begins within reasoning."""
        answer.begin_reasoning()
        yield from text.skip("\n")
        if (yield from text.until((self.end,), answer.reasoning)):
            answer.end_reasoning()
            yield from text.skip("\n")


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def left_open(rendered: str, chat: ChatPrompt) -> bool:
    """Whether a prompt, rendered from a chat, ends within reasoning of any format."""
    tail = rendered[-_TAIL:].rstrip()
    final = chat.messages[-1].content if chat.continue_final_message else ""
    return any(
        tail.endswith(form.begin) or final.rfind(form.begin) > final.rfind(form.end)
        for form in REASONING_FORMATS.values()
    )
