"""Grammars that tools ask for, as llguidance follows them: what they let pass, what they do not."""

from __future__ import annotations

import json

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.answers import grammar_for
from batonlm.core.request.request import Tool, ToolChoice, ToolUse
from batonlm.core.request.tool_formats import REASONING_FORMATS, TOOL_FORMATS
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

REQUIRED = ToolChoice(ToolUse.REQUIRED)
ONE = ToolChoice(ToolUse.REQUIRED, parallel=False)
NAMED = ToolChoice(ToolUse.REQUIRED, "get_weather")
AT_MOST_ONE = ToolChoice(parallel=False)

FIRST = '{"city": "B\\"ern", "days": 3}'
SHAPES = {
    # one call, and what makes it two
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {FIRST}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {FIRST}}}',
        '; {"name": "get-time", "parameters": {}}',
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {FIRST}}}',
        ', {"name": "get-time", "arguments": {}}',
    ),
    "pythonic": ('[get_weather(city="B\\"ern", days=3)', ", get-time()"),
}
ENDS = {"mistral": "]", "pythonic": "]"}
NEW_MISTRAL = (f"[TOOL_CALLS]get_weather[ARGS]{FIRST}", "[TOOL_CALLS]get-time[ARGS]{}")


def shapes(form: str, with_markers: bool) -> tuple[str, str]:
    """An answer of one call and one of two."""
    if form == "mistral" and with_markers:
        return NEW_MISTRAL[0], "".join(NEW_MISTRAL)
    one, more = SHAPES[form]
    end = ENDS.get(form, "")
    return one + end, one + more + end


@pytest.mark.deep
@pytest.mark.parametrize("with_markers", [False, True], ids=["letters", "tokens"])
@pytest.mark.parametrize("reasoning", [None, "think", "think left open", "mistral"])
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
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
    found = read([behind_text], TOOL_FORMATS[form].read)
    assert len(found.calls) == (form in ("hermes", "mistral"))
    for text, count in ((one, 1), (two, 2)):
        found = read(list(text), TOOL_FORMATS[form].read)
        assert found.complete and found.content == "" and len(found.calls) == count
        assert json.loads(found.calls[0][1]) == json.loads(FIRST)


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_arguments_follow_their_schema(form: str) -> None:
    grammar = grammar_for(TOOLS, REQUIRED, TOOL_FORMATS[form], None, left_open=False, tokens={})
    assert grammar is not None
    one, _ = shapes(form, with_markers=False)
    assert follows(grammar.text, one, with_markers=False)
    for wrong in (one.replace("3", '"3"'), one.replace("days", "daze"), one.replace("city", "c")):
        assert not follows(grammar.text, wrong, with_markers=False)


def test_free_answers_have_no_grammar() -> None:
    for choice in (ToolChoice(), ToolChoice(ToolUse.NONE)):
        form = TOOL_FORMATS["hermes"]
        assert grammar_for(TOOLS, choice, form, None, left_open=False, tokens={}) is None


def test_pythonic_takes_names_of_python_only() -> None:
    tool = Tool("f", parameters='{"properties": {"not a name": {}}}')
    with pytest.raises(InvalidArgument) as raised:
        grammar_for((tool,), REQUIRED, TOOL_FORMATS["pythonic"], None, left_open=False, tokens={})
    assert raised.value.field == "tools"
