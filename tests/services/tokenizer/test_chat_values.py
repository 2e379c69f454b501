"""What chat templates see of tools and calls, and what a template tells of its model's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from batonlm.core.request.formats.families import reasoning_format_of, tool_format_of
from batonlm.core.request.model import AnswerFormat
from batonlm.core.request.request import ChatPrompt, Message, Tool, ToolCall
from batonlm.tokenizer.renderers import chat_messages, chat_size, chat_tools
from tests.services.tokenizer.model_folders import encoded, encoder_of, ids_of, write_folder

CHAT = ChatPrompt(
    (
        Message("user", "hi", name="Ann"),
        Message(
            "assistant",
            "",
            tool_calls=(ToolCall("c1", "f", '{"a": [1]}'), ToolCall("c2", "f", "{broken")),
            reasoning="hm",
        ),
        Message("tool", "2", tool_call_id="c1"),
    ),
    tools=(Tool("f", "Does f", '{"type": "object", "b": 1, "a": 2}'), Tool("g")),
)


def test_a_template_sees_what_it_is_written_for() -> None:
    assert chat_messages(CHAT) == [
        {"role": "user", "content": "hi", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": [1]}},
                },
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    tools = chat_tools(CHAT)
    assert tools is not None
    assert json.dumps(tools[0]["function"]["parameters"]) == '{"type": "object", "b": 1, "a": 2}'
    assert tools[1] == {
        "type": "function",
        "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
    }
    assert chat_tools(ChatPrompt(CHAT.messages)) is None
    assert chat_size(CHAT) > 50


def test_tools_and_calls_are_rendered(tmp_path: Path) -> None:
    template = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}:{{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    encoder = encoder_of(write_folder(tmp_path, chat_template=template))
    shown = encoder.decode(ids_of(encoder, CHAT), False)
    assert shown == 'f;g;f:{"a": [1]};f:"{broken";'


def test_the_size_counts_tools(tmp_path: Path) -> None:
    encoder = encoder_of(write_folder(tmp_path), max_input_bytes=1024)
    chat = ChatPrompt((Message("user", "hi"),), tools=(Tool("f", "x" * 2000),))
    with pytest.raises(Exception, match="at most 1024"):
        encoded(encoder, chat)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "", ""),
        ("… <tool_call>\\n{ … <think> …", "hermes", "think"),
        ("{% if '</think>' in content %}", "", "think"),
        ("[TOOL_CALLS]", "mistral", ""),
        ("[THINK][TOOL_CALLS][ARGS]", "mistral", "mistral"),
        (
            '{"name": function name, "parameters": dictionary of …} <|python_tag|>',
            "llama3_json",
            "",
        ),
        ("[func_name1(params_name1=params_value1)] <|python_tag|>", "pythonic", ""),
    ],
)
def test_a_template_tells_the_formats(template: str, tools: str, reasoning: str) -> None:
    assert (tool_format_of(template), reasoning_format_of(template)) == (tools, reasoning)


def test_markers_are_told_that_are_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="[TOOL_CALLS]</think>{{ messages }}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    one = ("<tool_call>", tokenizer.encode("<tool_call>", add_special_tokens=False).ids[0])
    assert encoder_of(folder).answer_format == AnswerFormat("mistral", "think", (one,))
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    expected = {m: tokenizer.token_to_id(m) for m in ("<tool_call>", "[TOOL_CALLS]", "</think>")}
    assert dict(encoder_of(folder).answer_format.markers) == expected


def test_a_prompt_that_ends_within_reasoning_says_so(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    encoder = encoder_of(write_folder(tmp_path, chat_template=template))
    assert encoded(encoder, ChatPrompt((Message("user", "hi"),))).reasoning_open
    closed = ChatPrompt((Message("user", "<think>?"),), add_generation_prompt=False)
    assert not encoded(encoder, closed).reasoning_open
