"""Templates that clients bring: rendered where they can do no harm, and only if that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import InvalidArgument
from baton.core.request import ChatPrompt, Message
from baton.tokenizer.client_templates import ClientTemplates
from tests.services.tokenizer.model_folders import encoded, encoder_of, ids_of, write_folder

MESSAGES = (Message("user", "hi"), Message("assistant", "é 🐧"))
ENDLESS = (
    "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% if b == -1 %}x{% endif %}"
    "{% endfor %}{% endfor %}"
)
DOUBLING = (
    "{% set ns = namespace(x='0123456789') %}{% for a in range(40) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
UNWATCHED = "{{ '%0999999999d' % 7 }}{{ 'x'.center(999999999) | length }}"
MANY = "{% for a in range(2000) %}{{ messages[0].content }}{% endfor %}"


@pytest.fixture
def allowed() -> Iterator[ClientTemplates]:
    templates = ClientTemplates(cpu_s=0.3, max_characters=1024)
    yield templates
    templates.close()


def test_it_renders_as_the_models_own_would(tmp_path: Path, allowed: ClientTemplates) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}{{ bos_token }}"
    )
    theirs = encoder_of(write_folder(tmp_path / "a", bos_token="<s>"), client_templates=allowed)
    own = encoder_of(write_folder(tmp_path / "b", chat_template=source, bos_token="<s>"))
    chat = ChatPrompt(MESSAGES, template_kwargs='{"mood": "ü"}')
    expected = encoded(own, chat)
    for _ in range(2):
        found = encoded(
            theirs, ChatPrompt(MESSAGES, template=source, template_kwargs='{"mood": "ü"}')
        )
        assert found == expected


def test_without_leave_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder_of(write_folder(tmp_path)), ChatPrompt(MESSAGES, template="x"))
    assert raised.value.field == "template"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("{% if %}", "template"),
        ("{{ unclosed", "template"),
        (ENDLESS, "messages"),
        (DOUBLING, "messages"),
        (UNWATCHED, "messages"),
        (MANY, "messages"),
        ("{{ raise_exception('secret') }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages"),
        ("{{ [].append(messages) }}{{ cycler.__init__.__globals__ }}", "messages"),
    ],
)
def test_what_it_may_not_do_fails_it_alone(
    tmp_path: Path, allowed: ClientTemplates, source: str, field: str
) -> None:
    encoder = encoder_of(write_folder(tmp_path), client_templates=allowed)
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder, ChatPrompt(MESSAGES, template=source))
    assert raised.value.field == field
    assert "secret" not in raised.value.message
    assert ids_of(encoder, ChatPrompt(MESSAGES, template="fine"))
