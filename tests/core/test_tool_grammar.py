"""Grammars that tools ask for, as llguidance follows them: what they let pass, what they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.answers import grammar_for
from batonlm.core.request.formats.families import REASONING_FORMATS, TOOL_FORMATS
from batonlm.core.request.request import Tool, ToolChoice, ToolUse
from tests.core.answer_reading import read
from tests.core.marker_tokens import follows, marker_ids

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOLS = (Tool("get_weather", "The weather", json.dumps(WEATHER)), Tool("get-time"))
SCHEMAS = {"get_weather": WEATHER, "get-time": {}}

REQUIRED = ToolChoice(ToolUse.REQUIRED)
ONE = ToolChoice(ToolUse.REQUIRED, parallel=False)
NAMED = ToolChoice(ToolUse.REQUIRED, "get_weather")
AT_MOST_ONE = ToolChoice(parallel=False)
MANY = ToolChoice()

FIRST = '{"city": "B\\"ern", "days": 3}'
OTHER = '{"name": "get-time", "arguments": {}}'
SHAPES = {
    # one call, what makes it two, and what ends both
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {FIRST}}}\n</tool_call>',
        f"\n<tool_call>\n{OTHER}\n</tool_call>",
        "",
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {FIRST}}}',
        '; {"name": "get-time", "parameters": {}}',
        "",
    ),
    "llama4_json": (
        f'{{"name": "get_weather", "parameters": {FIRST}}}',
        '{"name": "get-time", "parameters": {}}',
        "",
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {FIRST}}}',
        f", {OTHER}",
        "]",
    ),
    "pythonic": ('[get_weather(city="B\\"ern", days=3)', ", get-time()", "]"),
    "granite": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {FIRST}}}',
        f", {OTHER}",
        "]",
    ),
    "minimax": (
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {FIRST}}}',
        f"\n{OTHER}",
        "\n</tool_calls>",
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nB"ern\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
        "",
    ),
    "glm45": (
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>B"ern</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "\n<tool_call>get-time\n</tool_call>",
        "",
    ),
    "glm47": (
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>B"ern</arg_value>'
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "<tool_call>get-time</tool_call>",
        "",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">B"ern</parameter>\n<parameter name="days">3</parameter>\n</invoke>',
        '\n<invoke name="get-time">\n</invoke>',
        "\n</minimax:tool_call>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{FIRST}\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{FIRST}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{FIRST}<|tool_call_end|>",
        "<|tool_call_begin|>functions.get-time:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>B"ern<|"|>,days:3}<tool_call|>',
        "<|tool_call>call:get-time{}<tool_call|>",
        "",
    ),
    "functiongemma": (
        '<start_function_call>call:get_weather{city:<escape>B"ern<escape>,days:3}<end_function_call>',
        "<start_function_call>call:get-time{}<end_function_call>",
        "",
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{FIRST}",
        "<|call|><|start|>assistant<|channel|>commentary to=functions.get-time "
        "<|constrain|>json<|message|>{}",
        "",
    ),
}
WHOLE = ("llama3_json", "llama4_json", "pythonic", "harmony")
"""Formats whose calls follow no text, or not in the same message."""
NEW_MISTRAL = (f"[TOOL_CALLS]get_weather[ARGS]{FIRST}", "[TOOL_CALLS]get-time[ARGS]{}")


def shapes(form: str, with_markers: bool) -> tuple[str, str]:
    """An answer of one call and one of two."""
    if form == "mistral" and with_markers:
        return NEW_MISTRAL[0], "".join(NEW_MISTRAL)
    one, more, end = SHAPES[form]
    return one + end, one + more + end


@pytest.mark.deep
@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("reasoning", [None, "think", "think left open", "mistral"])
@pytest.mark.parametrize("form", sorted({*TOOL_FORMATS} - {"harmony"}))
def test_calls_are_forced(form: str, reasoning: str | None, with_markers: bool) -> None:
    thinks = REASONING_FORMATS[reasoning.split()[0]] if reasoning else None
    left_open = reasoning == "think left open"
    thoughts = f"\nhm, well\n{thinks.end}\n\n" if thinks else ""
    if thinks and not left_open:
        thoughts = thinks.begin + thoughts
    one, two = shapes(form, with_markers)

    def lets(choice: ToolChoice, answer: str) -> bool:
        grammar = grammar_for(
            TOOLS,
            choice,
            TOOL_FORMATS[form],
            thinks,
            left_open=left_open,
            tokens=marker_ids(with_markers),
        )
        assert grammar is not None
        return follows(grammar.text, answer, with_markers=with_markers)

    for choice in (REQUIRED, ONE, NAMED, AT_MOST_ONE):
        assert lets(choice, thoughts + one)
        assert lets(choice, thoughts + two) is (choice is REQUIRED)
        assert lets(choice, thoughts + "Hello.") is (choice is AT_MOST_ONE)
        assert not lets(choice, thoughts + one.replace("get_weather", "get_whether"))
        assert not lets(choice, thoughts + one[:-1])
        assert left_open is not lets(choice, one)
    behind_text = "I look. " + one
    assert lets(AT_MOST_ONE, thoughts + behind_text)
    found = read([behind_text], TOOL_FORMATS[form].read, tools=SCHEMAS)
    assert len(found.calls) == (form not in WHOLE)


@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_forced_calls_are_read(form: str, with_markers: bool) -> None:
    for text, count in zip(shapes(form, with_markers), (1, 2), strict=True):
        found = read(list(text), TOOL_FORMATS[form].read, tools=SCHEMAS)
        assert found.complete and found.content == "" and len(found.calls) == count
        assert json.loads(found.calls[0][1]) == json.loads(FIRST)


@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
def test_harmony_calls_once_after_its_reasoning(with_markers: bool) -> None:
    one, two = shapes("harmony", with_markers)
    thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"

    def lets(choice: ToolChoice, answer: str) -> bool:
        form, reasoning = TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"]
        tokens = marker_ids(with_markers)
        grammar = grammar_for(TOOLS, choice, form, reasoning, left_open=False, tokens=tokens)
        assert grammar is not None
        return follows(grammar.text, answer, with_markers=with_markers)

    for choice in (REQUIRED, ONE, NAMED, AT_MOST_ONE):
        for before in ("", thoughts):
            assert lets(choice, before + one)
            assert not lets(choice, before + two)
            final = before + "<|channel|>final<|message|>Hello."
            assert lets(choice, final) is (choice is AT_MOST_ONE)
            assert not lets(choice, before + "Hello.")


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_arguments_follow_their_schema(form: str) -> None:
    grammar = grammar_for(TOOLS, REQUIRED, TOOL_FORMATS[form], None, left_open=False, tokens={})
    assert grammar is not None
    one, _ = shapes(form, with_markers=False)
    assert follows(grammar.text, one, with_markers=False)
    for wrong in (one.replace("3", '"3"'), one.replace("days", "daze"), one.replace("city", "c")):
        assert not follows(grammar.text, wrong, with_markers=False)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
"""It begins as calls do."""


@pytest.mark.parametrize(
    ("reasoning", "with_markers"),
    [
        (None, False),
        ("think left open", True),
        pytest.param(None, True, marks=pytest.mark.deep),
        pytest.param("think", False, marks=pytest.mark.deep),
        pytest.param("think", True, marks=pytest.mark.deep),
        pytest.param("think left open", False, marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_an_answer_of_a_schema_or_calls(
    form: str, reasoning: str | None, with_markers: bool
) -> None:
    thinks = REASONING_FORMATS[reasoning.split()[0]] if reasoning else None
    left_open = reasoning == "think left open"
    thoughts = f"\nhm\n{thinks.end}\n\n" if thinks else ""
    if thinks and not left_open:
        thoughts = thinks.begin + thoughts
    if form == "harmony":
        thinks, left_open = REASONING_FORMATS["harmony"], False
        thoughts = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    one, two = shapes(form, with_markers)

    def lets(answer: str, choice: ToolChoice = MANY, schema: Any = PERSON) -> bool:
        grammar = grammar_for(
            TOOLS,
            choice,
            TOOL_FORMATS[form],
            thinks,
            left_open=left_open,
            tokens=marker_ids(with_markers),
            schema=json.dumps(schema),
        )
        assert grammar is not None
        return follows(grammar.text, answer, with_markers=with_markers)

    for before in (thoughts, "") if not left_open else (thoughts,):
        for name in ("Ada", "get_weather", "get-time"):
            whole = f'{before}{final}{{"name": "{name}", "parameters": 36}}'
            assert lets(whole) and lets(whole.replace(" ", "").replace('{"', '{\n  "'))
            assert not lets(whole.replace("36", "true")) and not lets(whole[:-1])
            assert not lets(whole + one)
            assert not lets(before + one + whole.removeprefix(before))
        assert lets(before + one) and not lets(before + one[:-1])
        assert lets(before + two) is (form != "harmony")
        assert not lets(before + two, AT_MOST_ONE) and lets(before + one, AT_MOST_ONE)
        assert not lets(before + final + "Hello.") and not lets(before + final + "36")
        for answer in (one, final + '{"a": {"b": [1]}}', *([two] if form != "harmony" else [])):
            assert lets(before + answer, schema={"type": "object"})
    readers = [thinks.reader(left_open, TOOL_FORMATS[form])] if thinks else []
    if form != "harmony":
        readers.append(TOOL_FORMATS[form].read)
    answer = '{"name": "get_weather", "parameters": 36}'
    found = read(list(thoughts + final + answer), *readers, tools=SCHEMAS)
    assert (found.content.strip(), found.calls) == (answer, [])
    found = read(list(thoughts + one), *readers, tools=SCHEMAS)
    assert (found.content.strip(), len(found.calls)) == ("", 1)


def test_reasoning_before_a_schema_where_nothing_is_called() -> None:
    for name, before, after in (
        ("think", "<think>hm</think>\n\n", ""),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
            "<|channel|>final<|message|>",
        ),
    ):
        grammar = grammar_for(
            (),
            ToolChoice(),
            None,
            REASONING_FORMATS[name],
            left_open=False,
            tokens={},
            schema="true",
        )
        assert grammar is not None
        for answer in ("36", '["a"]'):
            assert follows(grammar.text, before + after + answer, with_markers=False)
            assert follows(grammar.text, after + answer, with_markers=False)
            assert not follows(grammar.text, before + after, with_markers=False)


def test_a_schema_that_is_none_is_refused() -> None:
    for schema in ("{", "[" * 100_000):
        with pytest.raises(InvalidArgument) as raised:
            grammar_for((), ToolChoice(), None, None, left_open=False, tokens={}, schema=schema)
        assert raised.value.field == "grammar"


def test_free_answers_have_no_grammar() -> None:
    for choice in (ToolChoice(), ToolChoice(ToolUse.NONE)):
        form = TOOL_FORMATS["hermes"]
        assert grammar_for(TOOLS, choice, form, None, left_open=False, tokens={}) is None


def test_pythonic_takes_names_of_python_only() -> None:
    tool = Tool("f", parameters='{"properties": {"not a name": {}}}')
    with pytest.raises(InvalidArgument) as raised:
        grammar_for((tool,), REQUIRED, TOOL_FORMATS["pythonic"], None, left_open=False, tokens={})
    assert raised.value.field == "tools"
