"""Chat templates, a model's and clients', cost no more than they may, whatever they do."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from batonlm.core.errors import InvalidArgument, Overloaded
from batonlm.core.request.request import ChatPrompt, Message
from batonlm.tokenizer.renderers import BASE_MEMORY_BYTES, MEMORY_PER_CHARACTER, Renderers, Setup
from tests.services.tokenizer.model_folders import CHATML, encoded, encoder_of, ids_of, write_folder

MESSAGES = (Message("user", "0123456789"), Message("assistant", "é 🐧"))
CPU_S = 0.2
HARD_S = 2 * CPU_S + 0.2
"""CPU time after which a process is ended, in whatever it is."""
MAX_CHARACTERS = 1 << 16

BOMBS = {
    "empty turns": "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% if b == -1 %}x"
    "{% endif %}{% endfor %}{% endfor %}",
    "what is said, many times": "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}",
    "text that doubles": "{% set ns = namespace(x='0123456789') %}{% for a in range(40) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}",
    "a list that doubles": "{% set ns = namespace(x=[1]) %}{% for a in range(40) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}",
    "text that replaces itself": "{% set ns = namespace(x=messages[0].content) %}"
    "{% for a in range(9) %}{% set ns.x = ns.x.replace('0', ns.x).replace('1', ns.x) %}{% endfor %}"
    "{{ ns.x | length }}",
    "random text": "{{ lipsum(n=100000) }}",
    "random text, all at once": "{{ lipsum(n=900, min=5000, max=9000) | length }}",
    "a wide number": "{{ ('%' ~ '02000000000d') % messages | length }}",
    "a wide number, whole": "{{ ('%02000000000d' % (messages | length)) | length }}",
    "a wide number while it is compiled": "{{ '%02000000000d' % 7 }}",
    "a wide field": "{{ '{:>1999999999}'.format(messages | length) | length }}",
    "a width of a filter": "{{ messages[0].content | center(1999999999) | length }}",
    "a width of a method": "{{ messages[0].content.zfill(1999999999) | length }}",
    "tabs": "{{ ('a\t' ~ messages[0].content).expandtabs(1999999999) | length }}",
    "an indentation": "{{ messages[0].content | indent(1999999999, true) | length }}",
    "an indentation of JSON": "{{ messages | tojson(indent=900000000) | length }}",
    "a power": "{% set x = 9 ** (9 ** 9) %}",
    "a repetition": "{{ ('abcd' * 900000000) | length }}",
    "all pairs": "{{ range(90000) | map('string') | map('replace', '', 'x' * 60000) | list }}",
    "a macro that calls itself": "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('01234') }}",
    "nested text to sort": "{% set x = range(90000) | map('string') | list %}"
    "{% for a in range(90000) %}{% set y = x | sort | unique | list %}{% endfor %}",
}


@pytest.fixture(scope="module")
def bounded() -> Iterator[Renderers]:
    with closing(Renderers(cpu_s=CPU_S, max_characters=MAX_CHARACTERS)) as renderers:
        yield renderers


def running() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "batonlm.tokenizer.render_process" in child.cmdline()
    ]


@pytest.mark.deep
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_fails_alone_within_its_bounds(bounded: Renderers, bomb: str) -> None:
    ours = resource.getrusage(resource.RUSAGE_SELF)
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(InvalidArgument) as raised:
        bounded.render(Setup(BOMBS[bomb]), ChatPrompt(MESSAGES))
    assert raised.value.field in ("messages", "template")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of those that had to be ended; with what starting them took.
    assert ended.ru_utime + ended.ru_stime - theirs.ru_utime - theirs.ru_stime < HARD_S + 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ours.ru_maxrss < 32 << 10
    limit = BASE_MEMORY_BYTES + MEMORY_PER_CHARACTER * MAX_CHARACTERS
    for child in running():
        assert child.rlimit(psutil.RLIMIT_AS) == (limit, limit) and limit < 1 << 29
    assert bounded.render(Setup("fine"), ChatPrompt(MESSAGES)).text == "fine"


def test_neighbours_are_rendered_meanwhile(bounded: Renderers) -> None:
    """Also those of the model's own template, which renders what clients say."""
    bomb = (
        "{% if bomb is defined %}" + BOMBS["empty turns"] + "{% endif %}{{ messages[0].content }}"
    )
    setup = Setup(bomb)
    stop = threading.Event()

    def bombs() -> int:
        count = 0
        while not stop.is_set():
            with pytest.raises(InvalidArgument, match="too much"):
                bounded.render(setup, ChatPrompt(MESSAGES, template_kwargs='{"bomb": 1}'))
            count += 1
        return count

    with ThreadPoolExecutor(1) as other:
        throwing = other.submit(bombs)
        try:
            for _ in range(200):
                assert bounded.render(setup, ChatPrompt(MESSAGES)).text == "0123456789"
        finally:
            stop.set()
        assert throwing.result() > 0
    # As many as threads that rendered at once.
    assert len(bounded.idle) <= 2


@pytest.mark.deep
def test_it_is_not_the_clients_fault_that_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, chat = Setup("{{ messages[0].content }}"), ChatPrompt(MESSAGES)
    others = set(running())
    with closing(Renderers(cpu_s=0.02, max_characters=MAX_CHARACTERS)) as renderers:
        renderers.render(setup, chat)
        (child,) = set(running()) - others
        child.suspend()
        with monkeypatch.context() as hurried, pytest.raises(Overloaded):
            hurried.setattr("batonlm.tokenizer.renderers.SLACK_S", 1.0)
            renderers.render(setup, chat)
        assert renderers.render(setup, chat).text == "0123456789"
        (child,) = set(running()) - others
        child.kill()
        child.wait()
        assert renderers.render(setup, chat).text == "0123456789"


def test_a_clients_template_renders_as_the_models_own(tmp_path: Path, bounded: Renderers) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}{{ bos_token }}"
    )
    theirs = encoder_of(write_folder(tmp_path / "a", bos_token="<s>"), client_renderers=bounded)
    own = encoder_of(write_folder(tmp_path / "b", chat_template=source, bos_token="<s>"))
    chat = ChatPrompt(MESSAGES, template_kwargs='{"mood": "ü"}')
    expected = encoded(own, chat)
    for _ in range(2):
        found = encoded(
            theirs, ChatPrompt(MESSAGES, template=source, template_kwargs='{"mood": "ü"}')
        )
        assert found == expected


def test_without_leave_a_clients_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder_of(write_folder(tmp_path)), ChatPrompt(MESSAGES, template="x"))
    assert raised.value.field == "template"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("{% if %}", "template"),
        ("{{ unclosed", "template"),
        ("{{ '" + "a" * 60_000 + "' * 60000 }}", "messages"),
        ("{{ raise_exception('no') }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages"),
        ("{{ [].append(messages) }}{{ cycler.__init__.__globals__ }}", "messages"),
    ],
)
def test_what_a_client_may_not_do_fails_it_alone(
    tmp_path: Path, bounded: Renderers, source: str, field: str
) -> None:
    encoder = encoder_of(write_folder(tmp_path), client_renderers=bounded)
    with pytest.raises(InvalidArgument) as raised:
        encoded(encoder, ChatPrompt(MESSAGES, template=source))
    assert raised.value.field == field
    assert "secret" not in raised.value.message
    assert ids_of(encoder, ChatPrompt(MESSAGES, template="fine"))


def test_what_a_client_brings_is_kept_from_the_models_processes(
    tmp_path: Path, bounded: Renderers
) -> None:
    with closing(Renderers(cpu_s=CPU_S, max_characters=MAX_CHARACTERS)) as own:
        folder = write_folder(tmp_path, chat_template=CHATML)
        encoder = encoder_of(folder, renderers=own, client_renderers=bounded)
        before = set(running())
        encoded(encoder, ChatPrompt(MESSAGES, template="theirs"))
        encoded(encoder, ChatPrompt(MESSAGES))
        assert set(running()) >= before and len(own.idle) == 1
