"""The tables of formats, by family, and how a chat template shows which ones it uses.

A table says what the family's chat template writes; sources are named in the tests that render
calls with such templates and read them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from batonlm.core.request.formats.bodies import (
    CallObject,
    KeywordCall,
    NamedObject,
    QuotedObject,
    TaggedText,
)
from batonlm.core.request.formats.calls import CallFormat, Layout, ToolFormat
from batonlm.core.request.formats.harmony import CHANNEL, END, MESSAGE, START, Harmony
from batonlm.core.request.formats.reader import AnswerParts, AnswerText, Reader, Reading
from batonlm.core.request.request import ChatPrompt

DEFAULT = "hermes"
"""The format for a model whose template shows no tool format."""

HARMONY = "harmony"
"""The format that has reasoning and calls in one."""

MISTRAL_ID_LENGTH = 9
"""Mistral's chat templates refuse ids of any other length."""

_HARMONY = Harmony()
_QWEN_TEXT = TaggedText(
    name=("<function=", ">\n"),
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>"),
    after_value="\n",
    end="</function>\n</tool_call>",
)


def _glm(between: str) -> CallFormat:
    """between: what stands between name, keys, values and calls."""
    text = TaggedText(
        name=("", between),
        key=("<arg_key>", "</arg_key>"),
        value=(f"{between}<arg_value>", "</arg_value>"),
        after_value=between,
        end="</tool_call>",
    )
    return CallFormat(
        (Layout(text, call="<tool_call>", between=between),),
        markers=(
            *("<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    )


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    # <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": CallFormat(
        (
            Layout(
                CallObject("arguments"), call="<tool_call>\n", close="\n</tool_call>", between="\n"
            ),
        ),
        markers=("<tool_call>", "</tool_call>"),
    ),
    # {"name": …, "parameters": {…}}; {…}, or the same after <|python_tag|>
    "llama3_json": CallFormat(
        (Layout(CallObject("parameters"), between="; "),),
        markers=("<|python_tag|>",),
        also_begin=("<|python_tag|>",),
    ),
    # <|python_start|>text<|python_end|>{"name": …, "parameters": {…}}{…}
    "llama4_json": CallFormat(
        (Layout(CallObject("parameters")),),
        markers=("<|python_start|>", "<|python_end|>"),
        also_begin=("<|python_end|>",),
        ignored=("<|python_start|>",),
    ),
    # [f(a=1), g(b="x")], also between <|python_start|> and <|python_end|>
    "pythonic": CallFormat(
        (Layout(KeywordCall(), open="[", between=", ", tail="]"),),
        markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
        also_begin=("<|python_start|>", "<|python_tag|>"),
        ignored=("<|python_end|>",),
    ),
    # [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…, of older models [TOOL_CALLS][{"name": …}, …]
    "mistral": CallFormat(
        (
            Layout(
                NamedObject(after="[ARGS]", call_id="[CALL_ID]"),
                call="[TOOL_CALLS]",
                needs=("[TOOL_CALLS]", "[ARGS]"),
            ),
            Layout(CallObject(), head="[TOOL_CALLS]", open="[", between=", ", tail="]"),
        ),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        id_length=MISTRAL_ID_LENGTH,
    ),
    # <|tool_call|>[{"name": …, "arguments": {…}}, …]; Granite 4 writes as Hermes does
    "granite": CallFormat(
        (Layout(CallObject(), head="<|tool_call|>", open="[", between=", ", tail="]"),),
        markers=("<|tool_call|>",),
    ),
    # <tool_call><function=f><parameter=a>…</parameter></function></tool_call>. The models sometimes
    # leave out <tool_call>.
    "qwen3_coder": CallFormat(
        (
            Layout(_QWEN_TEXT, call="<tool_call>\n", between="\n"),
            Layout(replace(_QWEN_TEXT, name=("", ">\n")), call="<function="),
        ),
        markers=("<tool_call>", "</tool_call>"),
    ),
    # <tool_call>f <arg_key>a</arg_key> <arg_value>…</arg_value> </tool_call>
    "glm45": _glm("\n"),
    # The same without line breaks.
    "glm47": _glm(""),
    # <minimax:tool_call><invoke name="f"><parameter name="a">…</parameter></invoke>…
    "minimax_m2": CallFormat(
        (
            Layout(
                TaggedText(
                    name=('<invoke name="', '">\n'),
                    key=('<parameter name="', '">'),
                    value=("", "</parameter>"),
                    after_value="\n",
                    end="</invoke>",
                    opening="<",
                ),
                head="<minimax:tool_call>",
                open="\n",
                between="\n",
                tail="\n</minimax:tool_call>",
            ),
        ),
        markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # <tool_calls>, an object in each line, </tool_calls>
    "minimax": CallFormat(
        (
            Layout(
                CallObject(), head="<tool_calls>", open="\n", between="\n", tail="\n</tool_calls>"
            ),
        ),
        markers=("<tool_calls>", "</tool_calls>"),
    ),
    # V3 and R1: function, a separator, the name, and the arguments as a block of code
    "deepseek_v3": CallFormat(
        (
            Layout(
                NamedObject("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
                head="<｜tool▁calls▁begin｜>",
                call="<｜tool▁call▁begin｜>",
                close="<｜tool▁call▁end｜>",
                between="\n",
                tail="<｜tool▁calls▁end｜>",
            ),
        ),
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
    ),
    # V3.1: the name, a separator, the arguments
    "deepseek_v31": CallFormat(
        (
            Layout(
                NamedObject(after="<｜tool▁sep｜>"),
                head="<｜tool▁calls▁begin｜>",
                call="<｜tool▁call▁begin｜>",
                close="<｜tool▁call▁end｜>",
                tail="<｜tool▁calls▁end｜>",
            ),
        ),
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
    ),
    # functions.name:index, a separator, the arguments; a thinking model may stop thinking with it
    "kimi_k2": CallFormat(
        (
            Layout(
                NamedObject("functions.", "<|tool_call_argument_begin|>", indexed=True),
                head="<|tool_calls_section_begin|>",
                call="<|tool_call_begin|>",
                close="<|tool_call_end|>",
                tail="<|tool_calls_section_end|>",
            ),
        ),
        markers=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        ends_reasoning=("<|tool_calls_section_begin|>",),
    ),
    # <|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>
    "gemma4": CallFormat(
        (Layout(QuotedObject("call:", '<|"|>'), call="<|tool_call>", close="<tool_call|>"),),
        markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "functiongemma": CallFormat(
        (
            Layout(
                QuotedObject("call:", "<escape>"),
                call="<start_function_call>",
                close="<end_function_call>",
            ),
        ),
        markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    HARMONY: _HARMONY,
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One format of reasoning before the answer. Reasoning stands between two markers at the
    beginning of the answer; where the prompt ends with the first marker, the answer begins within
    reasoning."""

    begin: str
    end: str
    markers: tuple[str, ...]
    """Texts that may be special tokens."""
    after: str = ""
    """What stands between the end of reasoning and the answer, but for line breaks."""
    content: str = ""
    """What stands before an answer's content."""
    whole: Reader | None = None
    """Reads whole answers, calls included, in place of the format's own reader and the tools'."""

    def reader(self, left_open: bool, tools: ToolFormat | None) -> Reader:
        """Returns a reader of the part of an answer that may be reasoning. left_open: the answer
        begins within it."""
        ends = (self.end, *(tools.ends_reasoning if tools is not None else ()))

        def read(text: AnswerText, answer: AnswerParts) -> Reading[None]:
            if not left_open:
                text.keep()
                yield from text.skip()
                if not (yield from text.follows(self.begin)):
                    text.rewind()
                    return
                text.forget()
            answer.begin_reasoning()
            yield from text.skip("\n")
            marker = yield from text.until(ends, answer.reasoning)
            if not marker:
                return
            answer.end_reasoning()
            if marker != self.end:
                text.unread(marker)
                return
            yield from text.skip("\n")

        return self.whole or read


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>", ("<think>", "</think>")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:", ()),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    HARMONY: ReasoningFormat(
        f"{CHANNEL}analysis{MESSAGE}",
        END,
        _HARMONY.markers,
        after=f"{START}assistant",
        content=f"{CHANNEL}final{MESSAGE}",
        whole=_HARMONY.read,
    ),
}

MARKERS = tuple(
    dict.fromkeys(
        [marker for form in TOOL_FORMATS.values() for marker in form.markers]
        + [marker for form in REASONING_FORMATS.values() for marker in form.markers]
    )
)
"""Every text that may be a special token and has a meaning in some format."""

_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((CHANNEL, MESSAGE), "harmony"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<|tool_call|>",), "granite"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<tool_calls>",), "minimax"),
    (("func_name1(",), "pythonic"),
    (("<|python_start|>", '"parameters": dictionary'), "llama4_json"),
    (("<|python_start|>", '"parameters": \''), "llama4_json"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)
"""Texts that are all in a template, and the format that they show; the first match counts."""

_REASONING_SIGNS = (
    (CHANNEL, "harmony"),
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
    ("<think>", "think"),
    ("Here is my thought process:", "granite"),
)


def tool_format_of(template: str) -> str:
    """Returns the name of the tool format that a chat template uses, or "" when it shows none."""
    found = (name for signs, name in _TOOL_SIGNS if all(sign in template for sign in signs))
    return next(found, "")


def reasoning_format_of(template: str) -> str:
    """Returns the name of the reasoning format that a chat template uses, or "" when it shows
    none."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "")


_TAIL = 64
"""In characters: more than a marker and the white space after it."""


def left_open(rendered: str, chat: ChatPrompt) -> bool:
    """Whether a rendered chat prompt ends within reasoning of any format."""
    tail = rendered[-_TAIL:].rstrip()
    final = chat.messages[-1].content if chat.continue_final_message else ""
    return any(
        tail.endswith(form.begin) or final.rfind(form.begin) > final.rfind(form.end)
        for form in REASONING_FORMATS.values()
    )
