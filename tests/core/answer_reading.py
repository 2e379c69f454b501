"""Reads answers in pieces, for tests of what is found in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from batonlm.core.request.formats.reader import AnswerParts, Reader, Schema
from batonlm.core.request.request import ToolCallDelta

TOOLS: dict[str, Schema] = {"f": {}, "get_weather": {}, "get-time": {}}


class Read(NamedTuple):
    """What an answer comes to: content, reasoning, and name and arguments of each call."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    complete: bool


def read(pieces: Sequence[str], *readers: Reader, tools: Mapping[str, Schema] = TOOLS) -> Read:
    """Checks on the way that deltas of calls come in order, each with its name and id first."""
    answer = AnswerParts(readers, tools, lambda index: f"id{index}")
    content, reasoning = "", ""
    calls: list[ToolCallDelta] = []
    for number, piece in enumerate([*pieces, ""]):
        parts = answer.feed(piece, last=number == len(pieces))
        content += parts.content
        reasoning += parts.reasoning
        for call in parts.tool_calls:
            if call.index == len(calls):
                assert call.name and call.id not in {"", *(other.id for other in calls)}
                calls.append(call)
            else:
                assert (call.index, call.id, call.name) == (len(calls) - 1, "", "")
                arguments = calls[-1].arguments + call.arguments
                calls[-1] = calls[-1].__class__(call.index, calls[-1].id, calls[-1].name, arguments)
    assert len(calls) == answer.num_calls
    return Read(content, reasoning, [(c.name, c.arguments) for c in calls], not answer.in_call)


def cut(text: str, edges: Sequence[int]) -> list[str]:
    """The text in pieces with these ends."""
    ends = sorted({edge % (len(text) + 1) for edge in edges} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]
