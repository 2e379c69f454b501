"""What the encoder refuses, by field, and what it bounds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.kvcache.prefix import prefix_hashes
from batonlm.core.request.request import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from batonlm.tokenizer.chat import MAX_REFUSAL
from batonlm.tokenizer.encoder import load_tokenizer
from batonlm.tokenizer.renderers import Renderers
from tests.services.tokenizer.made_tokenizers import TEXTS
from tests.services.tokenizer.model_folders import encoded, encoder_of, ids_of, write_folder


def chat(*contents: str, **options: Any) -> ChatPrompt:
    return ChatPrompt(tuple(Message("user", content) for content in contents), **options)


def refused(folder: Path, prompt: Prompt, max_input_bytes: int = 1 << 20) -> str:
    """The field named."""
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder_of(folder, max_input_bytes=max_input_bytes), prompt)
    return raised.value.field


def test_hashes_cover_full_units(tmp_path: Path) -> None:
    found = encoded(encoder_of(write_folder(tmp_path)), TextPrompt(TEXTS[0] * 3), b"salt")
    assert len(found.prefix_hashes) == len(found.token_ids) // 64 * 16 > 0
    assert found.prefix_hashes == prefix_hashes(found.token_ids, b"salt", "test")


def test_ids_pass_when_the_vocabulary_has_them(tmp_path: Path) -> None:
    encoder = encoder_of(write_folder(tmp_path))
    ids = (0, 5, encoder.vocab_size - 1)
    assert ids_of(encoder, TokenPrompt(ids)) == list(ids)


@pytest.mark.parametrize("ids", [(), (-1,), (3, 10**6), (2**31 - 1,)])
def test_other_ids_are_refused(tmp_path: Path, ids: tuple[int, ...]) -> None:
    assert refused(write_folder(tmp_path), TokenPrompt(ids)) == "prompt"


def test_ids_end_where_the_vocabulary_ends(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert refused(folder, TokenPrompt((encoder_of(folder).vocab_size,))) == "prompt"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt("", add_special_tokens=False), "prompt"),
        (TextPrompt("é" * 600), "prompt"),
        (TokenPrompt((1,) * 1025), "prompt"),
        (chat(), "messages"),
        (chat("a" * 600, "b" * 600), "messages"),
        (chat("a", continue_final_message=True), "continue_final_message"),
    ],
)
def test_bad_prompts_name_their_field(tmp_path: Path, prompt: Prompt, field: str) -> None:
    assert refused(write_folder(tmp_path), prompt, max_input_bytes=1024) == field


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template=None)
    assert not encoder_of(folder).has_chat_template
    assert refused(folder, chat("hi")) == "messages"


def test_a_client_sets_variables_of_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ level + 1 }}{{ names.a | join }}{{ bos_token }}"
    encoder = encoder_of(write_folder(tmp_path, chat_template=template, bos_token="<s>"))
    given = '{"level": 2, "names": {"a": ["x", "y"]}}'
    ids = ids_of(encoder, chat("hi", template_kwargs=given))
    assert encoder.decode(ids, False) == "hi3xy<s>"


def test_a_variable_that_the_template_lacks_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    template = "{% set mood = 1 %}{% for m in messages %}{{ m.content }}{{ level }}{% endfor %}"
    folder = write_folder(tmp_path, chat_template=template)
    given = '{"level": "x", "mood": "y"}'
    needed = chat("hi", template_kwargs=given, needed_variables=("level",))
    assert encoder_of(folder).decode(ids_of(encoder_of(folder), needed), False) == "hix"
    assert refused(folder, chat("hi", template_kwargs=given, needed_variables=("mood",))) == "mood"
    assert ids_of(encoder_of(folder), chat("hi", template_kwargs=given))


@pytest.mark.parametrize(
    "template",
    [
        "{% set secret = 1 %}{{ messages[0].content + secret }}",
        "{{ messages[9].content.x.y }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 2000000 }}",
    ],
)
def test_a_template_that_fails_names_messages_and_shows_nothing_of_itself(
    tmp_path: Path, template: str
) -> None:
    encoder = encoder_of(write_folder(tmp_path, chat_template=template))
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder, chat("hi"))
    assert raised.value.field == "messages"
    assert (
        raised.value.message
        == ("messages are not accepted by the chat template: check their roles and their order")
        or "too much" in raised.value.message
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("'Roles must alternate!'", "Roles must alternate!"),
        ("'unknown role: ' ~ messages[0].role", "unknown role: user"),
        ("'no <|im_end|> in ' ~ messages[0].content", "no <|im_end|> in <|im_end|> hi"),
        (r"'two\nlines\x00\ud800 and\tmore'", "two lines and more"),
        ("'x' * 5000", "x" * MAX_REFUSAL + "…"),
        ("17", "17"),
        ("''", "check their roles and their order"),
    ],
)
def test_what_a_template_says_when_it_refuses_is_passed_on(
    tmp_path: Path, words: str, shown: str
) -> None:
    template = "{{ raise_exception(" + words + ") }}"
    encoder = encoder_of(write_folder(tmp_path, chat_template=template))
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder, chat("<|im_end|> hi"))
    assert raised.value.field == "messages"
    assert raised.value.message == f"messages are not accepted by the chat template: {shown}"


@pytest.mark.deep
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(90000) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% if messages[0].role %}{% endif %}"
        "{% endfor %}{% endfor %}",
        "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% set c = 1 %}{% endfor %}"
        "{% endfor %}",
        "{% set x = 9 ** (9 ** 9) %}",
        "{% set ns = namespace(n=9) %}{% for a in range(60) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{% set x = 'abcd' * 900000000 %}{{ x | length }}",
        "{% set x = 900000000 * [1, 2] %}{{ x | length }}",
    ],
)
def test_a_template_has_a_budget(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, chat_template=template)
    with closing(Renderers(cpu_s=0.2, max_characters=1 << 20)) as renderers:
        encoder = encoder_of(folder, renderers=renderers)
        with pytest.raises(InvalidArgument, match="too much") as raised:
            encoded(encoder, chat("some content"))
    assert raised.value.field == "messages"


def test_a_loop_knows_where_it_is(tmp_path: Path) -> None:
    """Though it is counted, it has all that a template asks of it."""
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex }}"
        "{{ '!' if loop.last }}{{ loop.previtem.content if not loop.first }}"
        "{{ loop.nextitem.content if not loop.last }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() recursive %}{{ k * 2 }}{{ v * 3 }}{% endfor %}"
        "{% for m in messages if m.content == 'y' %}{{ loop.index }}{% endfor %}"
        "{% for m in [] %}{% else %}-{% endfor %}"
    )
    encoder = encoder_of(write_folder(tmp_path, chat_template=template))
    assert encoder.decode(ids_of(encoder, chat("x", "y")), False) == "1/22y2/21!xaa31-"


def test_a_final_message_that_is_not_shown_cannot_be_continued(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="{{ messages[0].content | upper }}")
    prompt = chat("hi", add_generation_prompt=False, continue_final_message=True)
    assert refused(folder, prompt) == "continue_final_message"


def test_a_panic_of_the_library_is_internal(tmp_path: Path) -> None:
    """A lone surrogate cannot come over protobuf; the library is not asked nicely here."""
    encoder = encoder_of(write_folder(tmp_path))
    with pytest.raises(Internal):
        encoded(encoder, TextPrompt("\ud800"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "nonsense"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "{{ unclosed"),
    ],
)
def test_a_broken_folder_names_model(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write_folder(tmp_path, chat_template=None)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(InvalidArgument) as raised:
        encoder_of(folder)
    assert raised.value.field == "model"


def test_a_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as raised:
        load_tokenizer(tmp_path / "nothing")
    assert raised.value.field == "model"
