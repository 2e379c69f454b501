"""Calls in answers: each format's examples, what is malformed, and that cuts do not matter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.request.formats.bodies import MAX_TEXT_VALUE
from batonlm.core.request.formats.families import REASONING_FORMATS, TOOL_FORMATS
from batonlm.core.request.formats.reader import MAX_KEPT, AnswerParts, Reader, Schema
from batonlm.core.request.request import ToolCallDelta
from tests.core.answer_reading import TOOLS, cut, read

SF = '{"city": "S\\"F", "n": [1, {"a": null}]}'

ANSWERS = [
    ("hermes", "plain", "plain", []),
    ("hermes", f'<tool_call>{{"name":"f","arguments":{SF}}}</tool_call>', "", [("f", SF)]),
    (
        "hermes",
        f'Well.\n<tool_call>\n{{"name": "f", "arguments": {SF}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get-time"}\n</tool_call>\n',
        "Well.",
        [("f", SF), ("get-time", "{}")],
    ),
    (
        "hermes",
        f'<tool_call>{{"arguments": {SF}, "name": "f"}}</tool_call> and so on',
        " and so on",
        [("f", SF)],
    ),
    ("llama3_json", f'{{"name": "f", "parameters": {SF}}}', "", [("f", SF)]),
    (
        "llama3_json",
        f'{{"type": "function", "name": "f", "parameters": {SF}}}; {{"name": "get-time"}}',
        "",
        [("f", SF), ("get-time", "{}")],
    ),
    (
        "llama3_json",
        f'I will.<|python_tag|>{{"name": "f", "arguments": {SF}}}',
        "I will.",
        [("f", SF)],
    ),
    ("llama3_json", 'See {"name": "f"}', 'See {"name": "f"}', []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {SF}}}, {{"name": "get-time"}}]',
        "",
        [("f", SF), ("get-time", "{}")],
    ),
    (
        "mistral",
        f"Yes[TOOL_CALLS]f[ARGS]{SF}[TOOL_CALLS]get-time[CALL_ID]abc123def[ARGS]{{}}",
        "Yes",
        [("f", SF), ("get-time", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]f{SF}", "", [("f", SF)]),
    ("pythonic", "[f()]", "", [("f", "{}")]),
    (
        "pythonic",
        "[f(a=1, b='it\\'s \"x\"', c=[True, None, -2.5e3]), get-time(z={'k': (1, 2)},)]",
        "",
        [
            ("f", '{"a": 1, "b": "it\'s \\"x\\"", "c": [true, null, -2.5e3]}'),
            ("get-time", '{"z": {"k": [1, 2]}}'),
        ],
    ),
    (
        "pythonic",
        '<|python_tag|>[f(a="\\x41\\u00e9\\U0001f600\\d\\n\\/")]',
        "",
        [("f", '{"a": "A\\u00e9\\ud83d\\ude00\\\\d\\n\\/"}')],
    ),
    ("pythonic", "[f(a=1)] then", " then", [("f", '{"a": 1}')]),
]

MALFORMED = [
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "what": 1}</tool_call>'),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", "a < b <tool_ca"),
    ("hermes", '<tool_call>{"arguments": {"a": "' + "x" * MAX_KEPT + '"}, "name": "f"}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '  {"name": "nobody", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]  nobody[ARGS]{}"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]1"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[nobody(a=1)]"),
    ("pythonic", "[f"),
    ("pythonic", "see [f(a=1)]"),
]

BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}', '{"a": tru', "}}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}', '{"a": "', '\n"}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a" 1}', '{"a" ', "1}"),
    ("pythonic", "[f(a=__import__('os'))]", '{"a": ', "__import__('os'))]"),
    ("pythonic", "[f(a=1 + 1)]", '{"a": 1', "+ 1)]"),
    ("pythonic", "[f(1)]", "{", "1)]"),
    ("pythonic", "[f(a=1, 'b')]", '{"a": 1', "'b')]"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_answers(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, TOOL_FORMATS[form].read)
        assert (found.content, found.calls, found.complete) == (content, calls, True)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, TOOL_FORMATS[form].read)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(("form", "text", "arguments", "content"), BROKEN)
def test_a_fault_in_arguments_ends_the_call_there(
    form: str, text: str, arguments: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, TOOL_FORMATS[form].read)
        assert found.calls == [("f", arguments)] and not found.complete
        assert found.content == content


QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
TYPED: dict[str, Schema] = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "u": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            "o": {"$ref": "#/$defs/o"},
            "e": {"enum": ["1", "2"]},
        },
        "$defs": {"o": {"type": "object"}},
    }
}


def argument(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("s", "12", "12"),
        ("s", "true", "true"),
        ("s", "null", "null"),
        ("s", '"quoted"', '"quoted"'),
        ("s", "{\"a\": 1}", '{"a": 1}'),
        ("s", "", ""),
        ("s", "\n x \n", "\n x \n"),
        ("s", "ends with </parameter> in it", "ends with </parameter> in it"),
        ("s", "<parameter=n>", "<parameter=n>"),
        ("s", "</function>\n</tool_call>", "</function>\n</tool_call>"),
        ("n", "12", 12),
        ("n", " 12 ", 12),
        ("n", "twelve", "twelve"),
        ("n", '"12"', "12"),
        ("u", "12", 12),
        ("u", "12 o'clock", "12 o'clock"),
        ("u", "None", None),
        ("u", "true", "true"),
        ("u", "[1]", "[1]"),
        ("o", '{"a": "</parameter>\\n</function>", "b": [true]}',
         {"a": "</parameter>\n</function>", "b": [True]}),
        ("o", "{'a': None, 'b': \"it's\"}", {"a": None, "b": "it's"}),
        ("e", "2", "2"),
        ("new", "3.5", 3.5),
        ("new", "True", True),
        ("new", "some text", "some text"),
        ("new", "[1, 'a']", [1, "a"]),
    ],
)  # fmt: skip
def test_the_schema_says_what_a_text_is(name: str, text: str, expected: object) -> None:
    answer = QWEN.format(argument(name, text) + argument("last", "x"))
    for pieces in ([answer], list(answer)):
        found = read(pieces, TOOL_FORMATS["qwen3_coder"].read, tools=TYPED)
        assert found.complete and found.content == ""
        ((_, arguments),) = found.calls
        assert json.loads(arguments) == {name: expected, "last": "x"}


def test_a_value_whose_type_is_unknown_is_a_string_when_it_is_long() -> None:
    text = "[" + "1, " * MAX_TEXT_VALUE
    answer = AnswerParts((TOOL_FORMATS["qwen3_coder"].read,), TYPED, str)
    pieces = QWEN.format(argument("u", text))
    calls: list[ToolCallDelta] = []
    for start in range(0, len(pieces), 1000):
        calls += answer.feed(pieces[start : start + 1000]).tool_calls
        assert answer.num_kept < MAX_KEPT
    assert json.loads("".join(call.arguments for call in calls)) == {"u": text}


KIMI = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
DEEPSEEK = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}"
HEADER = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

ODD = [
    # markers that are missing at the end, or before the call
    ("hermes", '<tool_call>{"name": "f"}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}\n<tool_call>{"name": "f"}', "", [("f", "{}")] * 2),
    ("qwen3_coder", f"<function=f>\n{argument('a', 'x')}</function>", "", [("f", '{"a": "x"}')]),
    ("qwen3_coder", f"<tool_call><function=f>{argument('a', 'x')}", "", [("f", '{"a": "x"}')]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>", "",
     [("f", '{"a": "x"}')]),
    ("glm47", "<tool_call>f\n</tool_call>", "", [("f", "{}")]),
    ("minimax_m2", '<minimax:tool_call><invoke name="f">', "", [("f", "{}")]),
    ("minimax", '<tool_calls>{"name": "f"}\n{"name": "f"}', "", [("f", "{}")] * 2),
    ("deepseek_v31", DEEPSEEK.format() + "<｜tool▁call▁end｜>", "", [("f", "{}")]),
    ("kimi_k2", "So.<|tool_calls_section_begin|>" + KIMI.format(0), "So.", [("f", "{}")]),
    ("gemma4", "<|tool_call>call:f{}", "", [("f", "{}")]),
    ("harmony", HEADER + "{}", "", [("f", "{}")]),
    # text around calls
    ("kimi_k2", f"a <|tool_calls_section_begin|>{KIMI.format(0)}<|tool_calls_section_end|>b", "ab",
     [("f", "{}")]),
    ("minimax_m2", 'a\n<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\nb',
     "a\nb", [("f", "{}")]),
    ("harmony", "<|channel|>commentary<|message|>a<|end|><|start|>assistant" + HEADER + "{}",
     "a", [("f", "{}")]),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
     "a\nb", []),
    ("harmony", f"a<|end|><|start|>assistant{HEADER}{{}}<|call|>", "a", [("f", "{}")]),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}", "", [("f", "{}")]),
    ("harmony", "<|channel|>analysis to=functions.f code<|message|>{}<|end|>", "", [("f", "{}")]),
    # values of Gemma
    ("gemma4", '<|tool_call>call:f{a:<|"|>}<tool_call|>"<|"|>,b:{c:[1,true,null]}}<tool_call|>', "",
     [("f", '{"a": "}<tool_call|>\\"", "b": {"c": [1, true, null]}}')]),
    # what is no call
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>", None, []),
    ("qwen3_coder", "<tool_call>\n<function=f> is a function", None, []),
    ("glm45", "<tool_call>f is a tool", None, []),
    ("glm45", "<tool_call>nobody\n</tool_call>", None, []),
    ("minimax_m2", "<minimax:tool_call> begins calls", None, []),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> f", None, []),
    ("kimi_k2", "<|tool_calls_section_begin|>functions.f:0", None, []),
    ("granite", "<|tool_call|>[1]", None, []),
    ("gemma4", "<|tool_call>call:f(1)", None, []),
    ("harmony", "<|channel|>commentary to=python<|message|>1", None, []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), ODD)
def test_odd_answers(form: str, text: str, content: str | None, calls: list[Any]) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, TOOL_FORMATS[form].read)
        assert (found.content, found.calls) == (text if content is None else content, calls)
        assert found.complete


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", f"<tool_call><function=f>{argument('a', 'x')}<parameter=b>\ncut"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_va"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x'),
        ("deepseek_v31", DEEPSEEK.format()[:-1] + '"a": 1'),
        ("harmony", HEADER + '{"a"'),
    ],
)
def test_a_call_that_is_cut_is_not_complete(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, TOOL_FORMATS[form].read)
        assert len(found.calls) == 1 and not found.complete
        with pytest.raises(ValueError):
            json.loads(found.calls[0][1])


def test_ids_of_kimi_are_its_own() -> None:
    answer = AnswerParts((TOOL_FORMATS["kimi_k2"].read,), TOOLS, lambda index: f"id{index}")
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    found = answer.feed(section.format(KIMI.format(3) + KIMI.format(4) + KIMI.format(4)), last=True)
    assert [call.id for call in found.tool_calls] == ["functions.f:3", "functions.f:4", "id2"]


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *(
            "<parameter=a>",
            "</parameter>",
            "<function=f>",
            "</function>",
            "<arg_key>",
            "</arg_key>",
        ),
        *("<arg_value>", "</arg_value>", '<invoke name="f">', "</invoke>", "<|tool_call>call:f{"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|channel|>final", "<|message|>", "<|end|>"),
        *("<|start|>assistant", "to=functions.f", '<|"|>', "functions.f:0", "<tool_call|>"),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "\n", "  ", "; ", ", ", "[", "]", "{", "}"),
        *('"name": "f"', '"arguments": ', '"parameters": ', "f(", "a=", "'x\\''", ")", "True"),
        *(SF, f'{{"name": "f", "arguments": {SF}}}', '{"name": "get-time"}', "f", "[f(a=1)]"),
        *('"', "\\", "\\u00", "12", "-", "é世", "<tool", "[TOOL", " " * 70),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(sorted(TOOL_FORMATS)),
    reasoning=st.sampled_from(["", "think", "mistral"]),
    left_open=st.booleans(),
    text=TEXTS,
    edges=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_cuts_do_not_matter(
    form: str, reasoning: str, left_open: bool, text: str, edges: list[int]
) -> None:
    readers: list[Reader] = [TOOL_FORMATS[form].read]
    if reasoning:
        thinks = REASONING_FORMATS[reasoning]
        readers.insert(0, thinks.reader(left_open, None))
    whole = read([text], *readers)
    assert read(cut(text, edges), *readers) == whole
    assert read(list(text), *readers) == whole
    if not whole.calls and not reasoning and form not in ("harmony", "pythonic", "llama4_json"):
        assert whole.content == text


@settings(max_examples=40, deadline=None)
@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8)
       | st.floats(allow_nan=False, allow_infinity=False),
       lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
       max_leaves=8))  # fmt: skip
def test_python_literals_become_json(value: object) -> None:
    found = read([f"[f(a={value!r})]"], TOOL_FORMATS["pythonic"].read)
    assert found.complete and json.loads(found.calls[0][1]) == {"a": value}


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_memory_is_bounded(form: str) -> None:
    """Whatever comes, what is held back is no more than a call's head and a piece."""
    answer = AnswerParts((TOOL_FORMATS[form].read,), TOOLS, str)
    for piece in [
        *(
            '<tool_call>{"arguments": {"',
            "<function=f><parameter=a>",
            "</parameter>",
            "<arg_value>",
        ),
        *(
            "<|channel|>",
            "to=functions.f<|message|>{",
            "<｜tool▁calls▁begin｜>",
            "<|tool_call>call:f{",
        ),
        *("[TOOL_CALLS]", '{"arguments": {"', " ", "a", "<"),
    ]:
        for _ in range(40):
            answer.feed(piece * 100)
            assert answer.num_kept < MAX_KEPT + 100 * len(piece) + 200
