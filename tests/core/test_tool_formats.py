"""Calls in answers: each format's examples, what is malformed, and that cuts do not matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonlm.core.request.formats.families import REASONING_FORMATS, TOOL_FORMATS
from batonlm.core.request.formats.reader import MAX_KEPT, AnswerParts, Reader
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


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
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
    if not whole.calls and not reasoning:
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
    for piece in ['<tool_call>{"arguments": {"', "[TOOL_CALLS]", '{"arguments": {"', " ", "a", "<"]:
        for _ in range(40):
            answer.feed(piece * 100)
            assert answer.num_kept < MAX_KEPT + 100 * len(piece) + 200
