"""Token ids equal those of transformers, for plain text and for chats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from batonlm.core.request.request import ChatPrompt, Message, TextPrompt
from batonlm.tokenizer.encoder import Encoder
from tests.services.tokenizer.made_tokenizers import FAMILIES, TEXTS, made
from tests.services.tokenizer.model_folders import CHATML, encoder_of, ids_of, write_folder

Pair = tuple[Encoder, Any]

CONFIGS: dict[str, dict[str, Any]] = {
    "no names": {},
    "names": {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}},
    "flags": {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": False},
    "plain tokens named": {"eos_token": "<tool_call>", "pad_token": "fox", "unk_token": "e"},
}

TEMPLATES = {
    "chatml": CHATML,
    "merges the system message": """\
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{ bos_token }}{% for message in messages %}
{% if loop.first %}[INST] {{ system }} {{ message['content'].strip() }} [/INST]
{% elif message.role == 'assistant' %} {{ message['content'] | trim }} {{ eos_token }}
{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}
{% endfor %}
""",
    "namespaces, macros, json and control of loops": """\
{%- macro show(m) %}{{ m.role | upper }}: {{ m.content }}{% endmacro %}
{%- set ns = namespace(count=0, seen=dict(x=1)) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 4 %}{% break %}{% endif %}
    {{- show(message) }}
    {{- message | tojson }}{{ {'b': '<é>', 'a': ns.seen} | tojson(indent=2, sort_keys=true) }}
    {%- generation %}{{ '<|user|>' }}{% endgeneration %}
{%- endfor %}
{%- if tools is not none or documents is defined and documents %}never{% endif %}
{%- if add_generation_prompt is defined and add_generation_prompt %}ASSISTANT:{% endif %}
""",
    "looks for thoughts": """\
{%- for m in messages %}{%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|user|>' ~ m.role ~ '\\n' }}
    {%- if m.role == 'assistant' and thought is defined %}{{- '<think>' ~ thought ~ '</think>' }}
    {%- endif %}
    {%- if content.startswith('<tool_response>') or '<' in content %}{{- '!' }}{%- endif %}
    {{- content ~ '</s>' }}
{%- endfor %}
""",
    "trims": "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} </>{% endfor %}",
}


def _known(config: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    """Without names of tokens that do not exist: transformers gives them ids beyond the model's."""
    return {
        name: value
        for name, value in config.items()
        if not name.endswith("_token")
        or isinstance(value, bool)
        or (value["content"] if isinstance(value, dict) else value) in vocabulary
    }


NEAR = [
    *("<", "a < b", "</", "<|user", "s>", "|>", "<tool_call>", "<think>x</think>\n\ny", "</think>"),
    *("<tool_response>1</tool_response>", "<tool_call>{}</tool_call>", "[", "[UNK", "▁", "s</s"),
]
"""What begins like a control token, and tokens that are none."""
CONTENTS = st.one_of(st.sampled_from(TEXTS), st.sampled_from(NEAR), st.text(max_size=20))
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
CHATS = st.lists(st.tuples(ROLES, CONTENTS), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Our encoder and transformers' tokenizer of the same folder, made once each."""
    known: dict[str, Pair] = {}

    def get(family: str, config: str = "names", template: str = "chatml") -> Pair:
        name = f"{family} {config} {template}".replace(" ", "_")
        if name not in known:
            folder = write_folder(
                tmp_path_factory.mktemp("models") / name,
                family,
                chat_template=TEMPLATES[template],
                **_known(CONFIGS[config], made(family).get_vocab()),
            )
            known[name] = (encoder_of(folder), AutoTokenizer.from_pretrained(folder))
        return known[name]

    return get


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", CONFIGS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(text=st.one_of(CONTENTS, st.sampled_from(["<s>hi</s> <tool_call> fox", "a\x00b"])))
def test_text(pair: Callable[..., Pair], family: str, config: str, text: str) -> None:
    encoder, theirs = pair(family, config)
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special)["input_ids"]
        if expected:
            assert ids_of(encoder, TextPrompt(text, special)) == expected


@pytest.mark.deep
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "unigram"])
@pytest.mark.parametrize("template", TEMPLATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(chat=CHATS, generation=st.booleans())
def test_chat(
    pair: Callable[..., Pair],
    family: str,
    template: str,
    chat: list[tuple[str, str]],
    generation: bool,
) -> None:
    encoder, theirs = pair(family, "names", template)
    conversation = [{"role": role, "content": content} for role, content in chat]
    expected = theirs.apply_chat_template(conversation, add_generation_prompt=generation)
    if not expected["input_ids"]:
        return
    prompt = ChatPrompt(tuple(Message(*m) for m in chat), add_generation_prompt=generation)
    assert ids_of(encoder, prompt) == expected["input_ids"]


@pytest.mark.parametrize("template", ["chatml", "trims"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(chat=CHATS, final=st.sampled_from(["So", " then ", "a\n", "é 😀", "x"]))
def test_continued_final_message(
    pair: Callable[..., Pair], template: str, chat: list[tuple[str, str]], final: str
) -> None:
    encoder, theirs = pair("byte_level", "names", template)
    messages = [*chat, ("assistant", final)]
    conversation = [{"role": role, "content": content} for role, content in messages]
    expected = theirs.apply_chat_template(conversation, continue_final_message=True)["input_ids"]
    prompt = ChatPrompt(
        tuple(Message(*m) for m in messages),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert ids_of(encoder, prompt) == expected


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    folder = write_folder(tmp_path, chat_template=None, chat_template_name="x")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text()[:-1] + f', "chat_template": {named!r}}}'.replace("'", '"'))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template([{"role": "user", "content": "hi"}])
    prompt = ChatPrompt((Message("user", "hi"),))
    assert ids_of(encoder_of(folder), prompt) == expected["input_ids"]


def test_saved_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(folder / "tokenizer.json"))
    expected = AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
    assert ids_of(encoder_of(folder), TextPrompt(TEXTS[0])) == expected
