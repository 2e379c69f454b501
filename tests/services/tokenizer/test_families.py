"""Every family's answers: what its chat template writes is read back, however it is cut."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.request.answers import grammar_for
from batonlm.core.request.formats.families import (
    MARKERS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    left_open,
    reasoning_format_of,
    tool_format_of,
)
from batonlm.core.request.formats.lark import schema_of
from batonlm.core.request.formats.reader import Reader, Schema
from batonlm.core.request.request import (
    ChatPrompt,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
)
from batonlm.detokenizer.text import DetokenizeOptions, StreamedText
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.tokenizer.chat import ChatTemplate, Sandbox
from batonlm.tokenizer.renderers import Setup
from tests import depth
from tests.core.answer_reading import Read, read
from tests.core.marker_tokens import follows, marker_ids, tokens
from tests.services.tokenizer.family_templates import FAMILIES, Family

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "round_trip": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object"},
        "anything": {},
    },
}
TOOLS = (Tool("book_trip", "Books a trip", json.dumps(TRIP)), Tool("get-time"))

ARGUMENTS: list[dict[str, Any]] = [
    {
        "city": "Zürich 世界 😀",
        "code": "00123",  # a string that looks like a number
        "note": None,
        "days": -3,
        "share": 2.5,
        "round_trip": True,
        "tags": ["a", 'b, "c"', "d\\e"],
        "deep": {"list": [{"x": [1, None, False]}], "text": "it's"},
        "anything": [1, "two"],
    },
    {},
    {"city": "null", "code": "true", "note": "null?", "days": 0, "deep": {}, "tags": []},
    {"city": "", "code": '{"a": 1}', "note": 'say "hi"\n\n  twice\n', "anything": "free text"},
]


@cache
def template_of(name: str) -> ChatTemplate:
    sandbox = Sandbox()
    sandbox.begin(cpu_s=60, max_characters=1 << 20)
    setup = Setup(FAMILIES[name].template)
    return ChatTemplate(setup, sandbox.from_string(setup.source), sandbox)


def written(
    name: str, calls: Iterable[tuple[str, dict[str, Any]]], content: str = "", reasoning: str = ""
) -> tuple[str, bool]:
    """What a model writes so that its template writes the same again; and whether the prompt ends
    within reasoning."""
    family, template = FAMILIES[name], template_of(name)
    user = Message("user", "Hello?")
    prompt = ChatPrompt((user,), tools=TOOLS)
    made = tuple(
        ToolCall(f"functions.{tool}:{index}", tool, json.dumps(arguments, ensure_ascii=False))
        for index, (tool, arguments) in enumerate(calls)
    )
    answer = Message("assistant", content, tool_calls=made, reasoning=reasoning)
    whole = template.render(ChatPrompt((user, answer), tools=TOOLS, add_generation_prompt=False))
    before = template.render(prompt).text
    text = whole.text
    if not reasoning and not text.startswith(before):
        # The prompt opens reasoning; this model writes none.
        before = before.removesuffix("<think>\n")
        text = text.removeprefix(before)
        return text.removesuffix(family.end), False
    assert text.startswith(before)
    return text.removeprefix(before).removesuffix(family.end), left_open(before, prompt)


def readers_of(family: Family, is_open: bool, tools: bool = True) -> list[Reader]:
    form = TOOL_FORMATS[family.tools]
    reasoning = REASONING_FORMATS.get(family.reasoning)
    readers = [form.read] if tools else []
    if reasoning is None:
        return list(readers)
    first = reasoning.reader(is_open, form if tools else None)
    return [first] if reasoning.whole else [first, *readers]


SCHEMAS: dict[str, Schema] = {tool.name: schema_of(tool) for tool in TOOLS}


def pieces_of(data: bytes, ends: Iterable[int]) -> list[str]:
    """The text in pieces, as a decoder of UTF-8 passes on what was cut between any two bytes."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    cuts = sorted({0, len(data), *ends})
    return [decode(data[a:b]) for a, b in pairwise(cuts)]


def found_in(name: str, pieces: list[str], is_open: bool, tools: bool = True) -> Read:
    family = FAMILIES[name]
    return read(pieces, *readers_of(family, is_open, tools), tools=SCHEMAS if tools else {})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_shows_its_formats(name: str) -> None:
    family = FAMILIES[name]
    assert tool_format_of(family.template) == family.tools
    assert reasoning_format_of(family.template) == family.reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    family = FAMILIES[name]
    for count in {min(count, family.most_calls) for count in (1, 2, 4)}:
        calls = [("get-time" if not a else "book_trip", a) for a in ARGUMENTS[:count]]
        for content in ("", "I look.") if family.content else ("",):
            for reasoning in ("", "Let me\n\nthink <b>") if family.reasons else ("",):
                text, is_open = written(name, calls, content, reasoning)
                found = found_in(name, [text], is_open)
                made = [(tool, json.loads(arguments)) for tool, arguments in found.calls]
                assert made == calls, text
                assert (found.content, found.reasoning) == (content, reasoning), text
                assert found.complete


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_without_calls_is_read_back(name: str) -> None:
    family = FAMILIES[name]
    end = "<|return|>" if name == "harmony" else family.end
    for reasoning in ("", "hm") if family.reasons else ("",):
        text, is_open = written(name, [], "Hello, 世界.", reasoning)
        found = found_in(name, [text.removesuffix(end)], is_open)
        assert found == ("Hello, 世界.", reasoning, [], True)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_between_bytes_gives_the_same(name: str) -> None:
    family = FAMILIES[name]
    calls = [("book_trip", ARGUMENTS[0]), ("get-time", {}), ("book_trip", ARGUMENTS[3])]
    text, is_open = written(
        name, calls, "Sö." if family.content else "", "hm 世" if family.reasons else ""
    )
    data = text.encode()
    whole = found_in(name, [text], is_open)
    assert len(whole.calls) == min(3, family.most_calls)
    assert found_in(name, pieces_of(data, range(len(data))), is_open) == whole
    for end in range(1, len(data), 1 if depth.DEEP else depth.SHARE):
        assert found_in(name, pieces_of(data, [end]), is_open) == whole


@settings(max_examples=depth.examples(300), deadline=None)
@given(data=st.data(), name=st.sampled_from(list(FAMILIES)))
def test_any_cut_of_any_text_gives_the_same(data: st.DataObject, name: str) -> None:
    """Also of answers that are cut off, and of markers in a wrong order."""
    family = FAMILIES[name]
    calls = [("book_trip", ARGUMENTS[0]), ("get-time", {}), ("book_trip", ARGUMENTS[3])]
    text, is_open = written(
        name, calls, "Sö." if family.content else "", "hm" if family.reasons else ""
    )
    markers = [*TOOL_FORMATS[family.tools].markers, "{", "\n", '"', "</parameter>", "  "]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    broken = "".join(
        text[a:b] + data.draw(st.sampled_from(["", *markers]))
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)
    )[: data.draw(st.integers(1, len(text)))]
    encoded = broken.encode()
    ends = data.draw(st.lists(st.integers(0, len(encoded)), max_size=12))
    whole = found_in(name, [broken], is_open)
    assert found_in(name, pieces_of(encoded, ends), is_open) == whole
    assert found_in(name, pieces_of(encoded, range(len(encoded))), is_open) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_calls_stay_text(name: str) -> None:
    text, is_open = written(name, [("book_trip", ARGUMENTS[0])])
    found = found_in(name, [text], is_open, tools=False)
    assert not found.calls and "book_trip" in found.content and "Zürich" in found.content


@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_asks_for_what_a_template_writes(name: str, with_markers: bool) -> None:
    """Character by character, so that a forced call is what the model was trained to write."""
    if name.startswith("mistral") and with_markers is (name == "mistral list"):
        return  # Which of its two formats a model writes follows from its tokens.
    family = FAMILIES[name]
    arguments = {
        "city": "Zürich 😀",
        "code": "12",
        "days": -3,
        "tags": ["a", "b"],
        "deep": {"list": [1]},
    }
    sets = [{}, arguments] if family.tools in ("gemma4", "functiongemma") else [arguments, {}]
    calls = [("get-time" if not each else "book_trip", each) for each in sets]
    text, _ = written(name, calls[: family.most_calls])
    text = text.removeprefix(family.bare).lstrip("\n").removeprefix("<|python_start|>")
    for marker in ("<|python_end|>",):
        text = text.replace(marker, "")
    if name == "harmony":  # The model writes the recipient behind the channel.
        text = text.replace(" to=functions.book_trip<|channel|>commentary json", HARMONY_HEADER)
    if name == "mistral list":  # The ids in a prompt are not written by the model.
        text = re.sub(r', "id": "[^"]*"', "", text).replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    grammar = grammar_for(
        TOOLS,
        ToolChoice(ToolUse.REQUIRED),
        TOOL_FORMATS[family.tools],
        None,
        left_open=False,
        tokens=marker_ids(with_markers),
    )
    assert grammar is not None
    assert follows(grammar.text, text, with_markers=with_markers), text


HARMONY_HEADER = "<|channel|>commentary to=functions.book_trip <|constrain|>json"


@pytest.mark.parametrize("name", FAMILIES)
def test_markers_that_are_special_tokens_reach_the_reader(name: str) -> None:
    """As the detokenizer passes them on, which skips other special tokens, token by token."""
    family = FAMILIES[name]
    tokenizer, _ = tokens(with_markers=True)
    calls = [("book_trip", ARGUMENTS[0]), ("get-time", {})]
    text, is_open = written(name, calls, reasoning="hm 世" if family.reasons else "")
    form, thinks = TOOL_FORMATS[family.tools], REASONING_FORMATS.get(family.reasoning)
    kept = (*form.markers, *(thinks.markers if thinks else ()))
    tail = tokenizer.encode("assistant", add_special_tokens=False).ids
    streamed = StreamedText(
        vocabulary_of_markers(),
        DetokenizeOptions(kept_special_tokens=kept, prompt_tail_ids=tuple(tail)),
    )
    pieces = []
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for position, token_id in enumerate(ids):
        streamed.append(position, [token_id], last=position == len(ids) - 1)
        pieces.append(streamed.take(1 << 20).text)
    assert found_in(name, pieces, is_open) == found_in(name, [text], is_open)


@cache
def vocabulary_of_markers() -> Vocabulary:
    tokenizer, _ = tokens(with_markers=True)
    return Vocabulary(tokenizer, frozenset(MARKERS))
