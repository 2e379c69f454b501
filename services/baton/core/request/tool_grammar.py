"""The grammar that a choice of tools asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.request.grammar import Grammar
from baton.core.request.lark import ANYTHING, Lark
from baton.core.request.reasoning import ReasoningFormat
from baton.core.request.request import Tool, ToolChoice, ToolUse
from baton.core.request.tool_formats.forms import ToolFormat


def grammar_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: ToolFormat,
    reasoning: ReasoningFormat | None,
    *,
    left_open: bool,
    tokens: Mapping[str, int],
) -> Grammar | None:
    """What every answer has to follow, or None where it is free.

    left_open: the prompt ends within reasoning. tokens: ids of the markers that are tokens. Raises
    InvalidArgument (`tools`) for what the format cannot write.
    """
    lark = Lark(tokens)
    if choice.use is ToolUse.REQUIRED:
        called = [tool for tool in tools if choice.name in ("", tool.name)]
        calls = form.calls(lark, called, choice.parallel and not choice.name)
        body = f"{_begin(lark, form)}{calls}"
    elif choice.use is ToolUse.AUTO and not choice.parallel:
        body = _at_most_one(lark, tools, form, reasoning)
    else:
        return None
    return lark.grammar(f"{_reasoning(lark, reasoning, left_open)}{lark.rule(body)}")


def _begin(lark: Lark, form: ToolFormat) -> str:
    return f"{lark.marker(form.begin)} " if form.begin else ""


def _at_most_one(
    lark: Lark, tools: Sequence[Tool], form: ToolFormat, reasoning: ReasoningFormat | None
) -> str:
    """Text in which no call begins; or a call, behind such text where the format has that."""
    call = form.calls(lark, tools, False)
    if not form.begin:
        # Text that begins like reasoning would be read as such, and a call behind it as a call.
        excluded = [f"{ANYTHING} {lark.literal(marker)} {ANYTHING}" for marker in form.markers]
        if reasoning is not None:
            excluded.append(f"{lark.literal(reasoning.begin)} {ANYTHING}")
        plain = " & ".join(
            [f"/[^\\s\\{form.opening}](?s:.*)/", *(f"~({each})" for each in excluded)]
        )
        return f'"" | {lark.terminal(plain)} | {call}'
    if lark.is_token(form.begin):
        return f"{ANYTHING} ({lark.marker(form.begin)} {call})?"
    return f"{lark.without(form.begin)} | {lark.through(form.begin)} {call}"


def _reasoning(lark: Lark, reasoning: ReasoningFormat | None, left_open: bool) -> str:
    """What the model may think before it answers; where it has begun to, it must come to an end."""
    if reasoning is None:
        return ""
    thoughts = f"{lark.through(reasoning.end)} /\\n{{0,2}}/ "
    return thoughts if left_open else f"({lark.marker(reasoning.begin)} {thoughts})? "
